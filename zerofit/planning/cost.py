"""What a planned run costs, from the price of a GPU-hour and the time of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.core.run_length import run_length

if TYPE_CHECKING:
    from zerofit.planning.search import EstimatedStrategy
    from zerofit.planning.solve import Answer

_SECONDS_PER_HOUR = 3600
_STEPS = 1000
"""Steps whose cost is shown, beside that of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of steps, in the currency of the price."""

    per_gpu_hour: float
    """The price of one GPU for an hour."""
    num_gpus: int
    """GPUs of all nodes."""
    step_time_s: float
    uncertainty: float
    """Share by which the time of a step, and so the cost, may be wrong."""
    num_steps: int | None
    """Optimizer steps of the run; None if unknown."""
    steps_source: str
    """What says the number of steps; if it is unknown, why."""

    @property
    def per_1000_steps(self) -> float:
        """The cost of 1,000 steps."""
        return self._of(_STEPS)

    @property
    def of_run(self) -> float | None:
        """The cost of all steps; None if their number is unknown."""
        return None if self.num_steps is None else self._of(self.num_steps)

    def _of(self, num_steps: int) -> float:
        return num_steps * self.step_time_s * self.num_gpus * self.per_gpu_hour / _SECONDS_PER_HOUR

    def __str__(self) -> str:
        words = f"costs {amount(self.per_1000_steps)} ±{self.uncertainty:.0%} per 1,000 steps"
        if self.of_run is not None:
            words += (
                f", {amount(self.of_run)} for the {self.num_steps:,} steps of the run ({self.steps_source})"
            )
        gpus = "1 GPU" if self.num_gpus == 1 else f"{self.num_gpus} GPUs"
        return f"{words}; {gpus} at {self.per_gpu_hour:g} an hour each"


def amount(cost: float) -> str:
    """Return an amount of money: "1,234.50"; small ones with two digits that are not zero."""
    return f"{cost:,.2f}" if cost >= 0.1 or not cost else f"{cost:.2g}"


def cost_line(answer: Answer, price: float) -> str:
    """Return the cost of the choice, or of what --fast takes as an example."""
    cost = cost_of(answer, price)
    if cost is None:
        why = "no time of a step is known" if answer.fits else "nothing fits"
        return f"cost unknown: {why}"
    is_open = answer.screen is not None and answer.screen.chosen is None
    return f"{'for example ' if is_open else ''}{cost}"


def cost_of(answer: Answer, price: float, *, judged: EstimatedStrategy | None = None) -> Cost | None:
    """Return what a plan's run costs; None if nothing fits or the time of a step is unknown.

    Args:
        answer: of the plan.
        price: of a GPU-hour.
        judged: the strategy; by default the choice.
    """
    judged = judged or answer.found.chosen
    if judged is None or not judged.fits or judged.estimate.step_time is None:
        return None
    time, spec = judged.estimate.step_time, answer.problem.spec
    length = None if spec.target is None else run_length(answer.plan, spec.target)
    steps = None if length is None or length.num_steps is None else length.num_steps * length.micro_batches
    return Cost(
        per_gpu_hour=price,
        num_gpus=answer.problem.topology.world_size,
        step_time_s=time.seconds,
        uncertainty=time.uncertainty,
        num_steps=steps,
        steps_source="no script says it" if length is None else length.source,
    )
