"""A rule to its row of the table: both examples and the reference run, and judged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.judge import Runs, judge
from harness.layout import reference_of, route_of, run_of
from harness.table import fingerprint
from zerofit.checking.rule import Effect

if TYPE_CHECKING:
    from rule_examples.example import Examples

    from harness.runner import Runner
    from zerofit.checking.rule import Rule

_HANG_LIMIT_S = 12.0
"""Shortest limit of a run that should not end."""
_HANG_TIMES_GOOD = 5
"""The limit at least, in times of what the good example takes: a busy machine slows both."""


class MismatchError(AssertionError):
    """A rule's evidence is not what is seen."""


def prove(rule: Rule, examples: Examples, runner: Runner) -> dict[str, Any]:
    """Return the row of a rule and its examples.

    Raises:
        MismatchError: the examples do otherwise than the rule says.
    """
    evidence = rule.evidence
    row: dict[str, Any] = {
        "rule": rule.id,
        "of": fingerprint(rule, examples),
        "outcome": evidence.outcome.value,
    }
    if evidence.not_reproduced:
        return {**row, "verdict": "documented, not reproduced", "seen": evidence.not_reproduced}
    asks = [name for name, _ in evidence.observed]
    good = runner.run(run_of(examples.good), asks=asks)
    hangs = evidence.outcome is Effect.HANGS
    limits = {"limit_s": max(_HANG_LIMIT_S, _HANG_TIMES_GOOD * good.seconds)} if hangs else {}
    runs = Runs(
        bad=runner.run(run_of(examples.bad), asks=asks, **limits),
        good=good,
        reference=runner.run(reference_of(examples.good, start=good.start)),
    )
    judgement = judge(evidence, runs)
    if judgement.mismatches:
        said = "".join(f"\n  {mismatch}" for mismatch in judgement.mismatches)
        folders = "".join(
            f"\n  {name}: {ended.folder}" for name, ended in (("bad", runs.bad), ("good", runs.good)) if ended
        )
        raise MismatchError(f"{rule.id} ({evidence.outcome}):{said}{folders}")
    row |= {"verdict": "reproduced", "seen": judgement.seen}
    if judgement.good_error is not None:
        row["good_error"] = float(f"{judgement.good_error:.1e}")
    return {
        **row,
        "route": route_of(examples.bad).value,
        "seconds": round(runs.bad.seconds + runs.good.seconds, 1),
    }
