"""Judges the runs of a rule's examples by its evidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerofit.checking.rule import Effect, Reproduction

if TYPE_CHECKING:
    from harness.runner import Ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Closeness:
    """Relative errors of weights, over how far the reference was trained."""

    same: float
    """Up to here they are the same."""
    far: float
    """From here they are different."""


FP32 = Closeness(same=1e-4, far=1e-2)
"""Two ranks round in another order than one, and CPU Adam in another than torch's: 3e-6 is seen."""
BF16 = Closeness(same=1e-1, far=5e-1)
"""bf16 keeps 8 bits of mantissa: over a few AdamW steps up to 7e-2 is seen."""
MUCH_LONGER = 3
"""Times the good run's duration from which the bad one counts as hanging."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """A rule's examples, run."""

    bad: Ended
    good: Ended
    reference: Ended | None
    """The good example in one process without DeepSpeed; None where there is no such run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What was seen, and whether it is what the rule says."""

    mismatches: tuple[str, ...]
    """What is otherwise than declared; empty where the evidence holds."""
    seen: str
    """The bad run in one line: its error's last line, or its numbers."""
    good_error: float | None
    """How far the good run's weights are from the reference; None where nothing trains."""


def judge(evidence: Reproduction, runs: Runs) -> Judgement:
    """Return True if the bad run goes wrong as declared, and the good one trains to the reference."""
    mismatches = []
    good_error = None
    if runs.good.exit_code != 0:
        mismatches.append(f"the good example does not end well: {how_ended(runs.good)}")
    elif runs.reference is not None:
        if runs.reference.exit_code != 0:
            mismatches.append(f"the reference does not end well: {how_ended(runs.reference)}")
        elif _trains(runs):
            good_error = distance(runs.good, runs.reference)
            if not good_error <= _closeness(runs.good).same:
                mismatches.append(f"the good example's weights are off by {good_error:.2g}")
    found, seen = _BY_OUTCOME[evidence.outcome](evidence, runs)
    if runs.bad.exit_code == 0 and evidence.outcome in (Effect.FAILS, Effect.HANGS):
        found = [f"the bad example ends well, and should have been one that {evidence.outcome}"]
    return Judgement(mismatches=(*mismatches, *found), seen=seen, good_error=good_error)


def _trains(runs: Runs) -> bool:
    """Return True if the good example takes any optimizer step, in either of its runs."""
    assert runs.reference is not None
    return any(ended.observed.get("optimizer_steps") != 0 for ended in (runs.good, runs.reference))


def _fails(evidence: Reproduction, runs: Runs) -> tuple[list[str], str]:
    if runs.bad.exit_code is None:
        return [f"the bad example hangs: {how_ended(runs.bad)}"], "hangs"
    if not evidence.says:
        return ["the evidence does not say what the error says"], how_ended(runs.bad)
    if evidence.says not in runs.bad.text:
        return [f"{evidence.says!r} is not in the error: {how_ended(runs.bad)}"], how_ended(runs.bad)
    line = next(line for line in reversed(runs.bad.text.splitlines()) if evidence.says.split("\n")[0] in line)
    return [], line.strip()[:200]


def _hangs(evidence: Reproduction, runs: Runs) -> tuple[list[str], str]:
    if runs.bad.exit_code is None and runs.bad.seconds < MUCH_LONGER * runs.good.seconds:
        return [f"the good example takes {runs.good.seconds:.0f} s: wait longer for the bad one"], ""
    if runs.bad.exit_code is None:
        return [], f"still alive after {runs.bad.seconds:.0f} s"
    return [f"the bad example ends: {how_ended(runs.bad)}"], how_ended(runs.bad)


def _differs(evidence: Reproduction, runs: Runs) -> tuple[list[str], str]:
    if runs.bad.exit_code != 0:
        return [f"the bad example does not end well: {how_ended(runs.bad)}"], how_ended(runs.bad)
    error = distance(runs.bad, runs.reference or runs.good)
    seen = f"weights off by {error:.2g}"
    found = _unseen(evidence, runs)
    if not error > _closeness(runs.good).far:
        found.append(f"the bad example's weights are off by {error:.2g} only")
    return found, seen


def _ignored(evidence: Reproduction, runs: Runs) -> tuple[list[str], str]:
    if runs.bad.exit_code != 0:
        return [f"the bad example does not end well: {how_ended(runs.bad)}"], how_ended(runs.bad)
    seen = ", ".join(f"{name}={_get(runs.bad, name)!r}" for name, _ in evidence.observed)
    found = _unseen(evidence, runs)
    if not evidence.observed:
        found.append("the evidence does not say what the engine shows")
    elif all(_get(runs.good, name) == value for name, value in evidence.observed):
        found.append(f"the good example shows the same: {seen}")
    return found, seen


def _costs(evidence: Reproduction, runs: Runs) -> tuple[list[str], str]:
    if runs.bad.exit_code != 0:
        return [f"the bad example does not end well: {how_ended(runs.bad)}"], how_ended(runs.bad)
    error = distance(runs.bad, runs.reference or runs.good)
    found = _unseen(evidence, runs)
    if not error <= _closeness(runs.bad).same:
        found.append(f"the bad example's weights are off by {error:.2g}")
    seen = ", ".join(f"{name}={_get(runs.bad, name)!r}" for name, _ in evidence.observed)
    return found, f"weights off by {error:.2g}; {seen}" if seen else f"weights off by {error:.2g}"


_BY_OUTCOME = {
    Effect.FAILS: _fails,
    Effect.HANGS: _hangs,
    Effect.DIFFERS: _differs,
    Effect.IGNORED: _ignored,
    Effect.COSTS: _costs,
}


def _unseen(evidence: Reproduction, runs: Runs) -> list[str]:
    return [
        f"{name} is {_get(runs.bad, name)!r}, not {value!r}"
        for name, value in evidence.observed
        if _get(runs.bad, name) != value
    ]


def _get(ended: Ended, name: str) -> Any:
    return ended.observed.get(name, "not observed")


def how_ended(ended: Ended) -> str:
    """Return the end of a run in one line."""
    if ended.exit_code is None:
        return f"still alive after {ended.seconds:.0f} s"
    if ended.exit_code == 0:
        return "exit 0"
    return f"exit {ended.exit_code}: {_last_error(ended.text)}"


def _last_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.split(" ")[0] or "error:" in line]
    # Ranks whose peer is gone say so, and that is not why the run failed.
    own = [line for line in errors if "closed by peer" not in line and "Connection" not in line]
    return (own or errors or lines or ["no output"])[-1][:200]


def _closeness(ended: Ended) -> Closeness:
    return BF16 if ended.observed.get("parameter_dtype") == "bfloat16" else FP32


def distance(run: Ended, reference: Ended) -> float:
    """Return the distance of a run's weights from the reference's, relative to how far those were trained."""
    import numpy

    own, theirs, first = run.weights(), reference.weights(), reference.weights("first")
    if not theirs or own.keys() < theirs.keys():
        return float("inf")
    start = first or {name: numpy.zeros_like(weight) for name, weight in theirs.items()}
    off = sum(float(((own[name] - theirs[name]).astype("float64") ** 2).sum()) for name in theirs)
    moved = sum(float(((start[name] - theirs[name]).astype("float64") ** 2).sum()) for name in theirs)
    return float((off / moved) ** 0.5) if moved else float("inf")
