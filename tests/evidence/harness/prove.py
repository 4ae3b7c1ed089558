"""A rule to its row of the table: both examples and the reference run, and judged."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rule_examples.example import SCRIPT_FILE, example_files, group_flags, rank_flags, strategy_flags
from runs import run_command

from harness.judge import Runs, judge
from harness.layout import reference_of, route_of, run_of
from harness.table import fingerprint
from zerofit.checking.rule import Effect
from zerofit.core.errors import EXIT_USAGE
from zerofit.core.plan import Topology

if TYPE_CHECKING:
    from rule_examples.example import Example, Examples
    from runs import Run

    from harness.runner import Runner
    from zerofit.checking.rule import Rule

_ON_TWO_GPUS = ("--dry-run", "--gpus=2x24GB", "--num-processes=2")
_HANG_LIMIT_S = 12.0
"""Shortest limit of a run that should not end."""
_HANG_TIMES_GOOD = 5
"""The limit at least, in times of what the good example takes: a busy machine slows both."""


class MismatchError(AssertionError):
    """A rule's evidence is not what is seen."""


def _prove_refused(rule: Rule, examples: Examples) -> dict[str, Any]:
    """Return what zerofit says about a bad script; the good one, captured like it, it would train."""
    bad, good = _launch_dry(examples.bad), _launch_dry(examples.good)
    said = [line for line in bad.stderr.splitlines() if line.startswith(f"error[{rule.id}]")]
    if not said or bad.exit_code != EXIT_USAGE:
        raise MismatchError(
            f"{rule.id}: the bad script is not refused by it: exit {bad.exit_code}\n{bad.stderr}"
        )
    if good.exit_code != 0:
        raise MismatchError(f"{rule.id}: the good script is refused too\n{good.stderr}")
    return {"seen": said[0], "route": route_of(examples.bad).value}


def _launch_dry(example: Example) -> Run:
    """Run `zerofit launch --dry-run`, which captures the script and plans, with an example's flags."""
    if example.ranks is not None:
        flags = ("--dry-run", *rank_flags(example.ranks).split())
    else:
        assert example.strategy is not None
        groups = group_flags(example.topology or Topology())
        flags = (*_ON_TWO_GPUS, *strategy_flags(example.strategy).split(), *groups.split())
    with tempfile.TemporaryDirectory() as folder:
        for name, text in example_files(example).items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        command = (sys.executable, "-m", "zerofit", "launch", *flags, SCRIPT_FILE)
        return run_command(command, Path(folder), XDG_CACHE_HOME=folder)


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
    if evidence.outcome is Effect.REFUSED:
        return {**row, "verdict": "reproduced", **_prove_refused(rule, examples)}
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
