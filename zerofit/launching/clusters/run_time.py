"""RunTime: how long a run takes, from its steps and their predicted time, and in which words that is said."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerofit.core.run_length import RunLength, run_length
from zerofit.core.units import format_duration

if TYPE_CHECKING:
    from zerofit.core.plan import Plan

_STARTUP_S = 1800
"""ASSUMPTION: half an hour is enough for start, data, evaluation and checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTime:
    """The predicted time of a run, with its derivation."""

    length: RunLength
    step_time_s: float | None
    """Predicted; None if unknown."""
    uncertainty: float
    """Of the step's time, relative."""
    other_s: int = _STARTUP_S
    """Start, data, evaluation and checkpoints."""

    @property
    def training_s(self) -> float | None:
        """The time of all steps, with its uncertainty; None if unknown."""
        if self.length.num_steps is None or self.step_time_s is None:
            return None
        batches = self.length.num_steps * self.length.micro_batches
        return batches * self.step_time_s * (1 + self.uncertainty)

    @property
    def wall_time_s(self) -> int | None:
        """The whole run; None if unknown."""
        return None if self.training_s is None else math.ceil(self.training_s) + self.other_s

    @property
    def missing(self) -> str:
        """What a prediction lacks, as a sentence's start; empty if there is one."""
        if self.length.num_steps is None:
            return str(self.length)
        return "the time of a step is not predicted" if self.step_time_s is None else ""

    @property
    def sum_words(self) -> str:
        """The derivation of the time in a few words; empty if it is unknown."""
        if self.training_s is None or self.wall_time_s is None or self.step_time_s is None:
            return ""
        count = f"{self.length.num_steps} steps"
        if self.length.micro_batches > 1:
            count += f" x {self.length.micro_batches}"
        return (
            f"{count} x {_seconds(self.step_time_s)} +{self.uncertainty:.0%} = "
            f"{format_duration(self.training_s)}, plus {self.other_s // 60} min for loading, evaluation and "
            "saving"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the derivation as `zerofit submit --json` prints it; None where it is unknown."""
        return {
            **dataclasses.asdict(self.length),
            "step_time_s": self.step_time_s,
            "step_time_uncertainty": self.uncertainty,
            "training_s": self.training_s,
            "other_s": self.other_s,
            "predicted_s": self.wall_time_s,
        }


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def run_time(plan: Plan, target: tuple[str, ...]) -> RunTime:
    """Return how long a planned run takes; on the CPU, for which nothing is predicted, it is unknown.

    Args:
        plan: of the run.
        target: the script and its arguments.
    """
    step = None if plan.estimate is None or plan.topology.on_cpu else plan.estimate.step_time
    return RunTime(
        length=run_length(plan, target),
        step_time_s=None if step is None else step.seconds,
        uncertainty=0.0 if step is None else step.uncertainty,
    )


def time_sentences(
    time: RunTime, *, said_s: int | None, default: str | None, restarts: bool
) -> tuple[str, ...]:
    """Return the derivation of a job's time limit, in sentences.

    Args:
        time: of the run.
        said_s: the limit that the user set; None for the predicted one.
        default: what applies if neither is known: "the cluster's default limit applies"; None if the
            scheduler has no time limits.
        restarts: True if the job is started again after its limit.
    """
    predicted_s = time.wall_time_s
    steps = () if time.length.num_steps is None else (f"trains {time.length}",)
    if said_s is None and predicted_s is None:
        sets = f"; {default}, and --time sets one" if default else ""
        return (*steps, f"{time.missing}{sets}")
    if said_s is None:
        what = "time limit" if default else "takes about"
        return (*steps, f"{what} {format_duration(predicted_s or 0)}: {time.sum_words}")
    own = f"time limit {format_duration(said_s)}, by --time"
    if predicted_s is None:
        return (*steps, f"{own}; {time.missing}")
    sentence = f"{own}; predicted {format_duration(predicted_s)}: {time.sum_words}"
    if predicted_s <= said_s:
        return (*steps, sentence)
    after = "the job is then started again and resumes" if restarts else "the job then ends: raise --time"
    return (*steps, sentence, f"--time may be too short by {format_duration(predicted_s - said_s)}; {after}")
