"""A run's measurements beside what its plan predicted, as rows, and as the text of `zerofit runs show`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.core.estimates import Holder, RunPhase
from zerofit.core.rank_observation import ESTIMATED_PHASES
from zerofit.core.text_table import table_lines
from zerofit.core.units import format_bytes
from zerofit.launching.clusters.follow import status_lines
from zerofit.launching.run_folder import typed_name
from zerofit.launching.run_report import end_of_run, measured_in, plan_of_run
from zerofit.planning.plan_labels import seconds, strategy_words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.core.estimates import Estimate
    from zerofit.core.plan import Plan
    from zerofit.core.run_report import Measured
    from zerofit.launching.clusters.follow import FollowedRun
    from zerofit.launching.run_report import RecordedEnd

HEADER = ("", "predicted", "measured", "error")
NO_GPU = "It ran on CPU ranks: its plan is for GPUs, of which nothing was measured."


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedNumber:
    """One number of a run; None where it is not known."""

    name: str
    predicted: float | None
    measured: float | None
    uncertainty: float | None
    """Of the prediction, relative."""
    is_time: bool = False

    @property
    def error(self) -> float | None:
        """Relative, positive where too much was predicted."""
        return self.predicted / self.measured - 1 if self.predicted and self.measured else None

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """As displayed."""
        within = "" if self.uncertainty is None else f" ±{self.uncertainty:.0%}"
        return (
            self.name,
            "-" if self.predicted is None else f"{self._show(self.predicted)}{within}",
            "-" if self.measured is None else self._show(self.measured),
            "-" if self.error is None else f"{self.error:+.1%}",
        )

    def _show(self, number: float) -> str:
        return seconds(number) if self.is_time else format_bytes(round(number))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRun:
    """A run as it is shown: its plan, what its ranks measured, and its end."""

    run: FollowedRun
    plan: Plan
    end: RecordedEnd | None
    measured: Measured

    @property
    def estimate(self) -> Estimate | None:
        """What was predicted of the devices that it ran on."""
        return None if self.plan.topology.on_cpu else self.plan.estimate


def shown_run(run: FollowedRun) -> ShownRun:
    """Return a run with its records.

    Raises:
        UserError: they can't be read.
    """
    end = end_of_run(run)
    step_time_s = None if end is None else end.step_time_s
    measured = measured_in(run.attempt / "ranks", step_time_s=step_time_s)
    return ShownRun(run=run, plan=plan_of_run(run), end=end, measured=measured)


def compared(shown: ShownRun) -> tuple[ComparedNumber, ...]:
    """Return the peaks of all phases, the largest, and the time of a step."""
    return tuple(_compared(shown))


def _compared(shown: ShownRun) -> Iterator[ComparedNumber]:
    estimate, measured = shown.estimate, shown.measured
    device = None if estimate is None else estimate.device
    largest = None if device is None else max(phase.held_by(*_RESERVED) for phase in device.phases)
    within = None if device is None else device.uncertainty
    if device is not None or measured.allocated_bytes is not None:
        tensors = None if device is None else device.most_tensors
        yield _memory("tensors, at most", tensors, measured.allocated_bytes, within)
        yield _memory("reserved by PyTorch, at most", largest, measured.reserved_bytes, within)
    seen = {ESTIMATED_PHASES.get(phase.phase): phase for phase in measured.phases}
    for phase in RunPhase:
        expected, found = None if device is None else device.of(phase), seen.get(phase)
        if expected is None and found is None:
            continue
        yield _memory(
            f"tensors in {phase.value}",
            None if expected is None else expected.held_by(Holder.TENSORS),
            None if found is None else found.allocated_bytes,
        )
    step_time = None if estimate is None else estimate.step_time
    yield ComparedNumber(
        name="step",
        predicted=None if step_time is None else step_time.seconds,
        measured=measured.step_time_s,
        uncertainty=None if step_time is None else step_time.uncertainty,
        is_time=True,
    )
    yield _memory("host memory of a rank", None, measured.host_bytes or None)


_RESERVED = (Holder.TENSORS, Holder.CACHE)


def _memory(
    name: str, predicted: int | None, measured: int | None, uncertainty: float | None = None
) -> ComparedNumber:
    return ComparedNumber(name=name, predicted=predicted, measured=measured, uncertainty=uncertainty)


def recovery_words(shown: ShownRun) -> list[str]:
    """Return each restart with another plan, in a sentence."""
    words = []
    for recovery in () if shown.end is None else shown.end.recoveries:
        lost = "some steps" if recovery.lost_steps is None else f"{recovery.lost_steps} steps"
        how = f"resumed from {recovery.resumed_from}" if recovery.resumed_from else "started over"
        at = "" if recovery.step is None else f" after step {recovery.step}"
        words.append(
            f"out of memory{at} with {recovery.strategy_before}: {how} with {recovery.strategy}, {lost} again"
        )
    return words


def comparison_text(shown: ShownRun, *, width: int | None) -> str:
    """Return what `zerofit runs show` prints."""
    lines = [*status_lines(shown.run), f"plan:   {strategy_words(shown.plan)}"]
    lines += [f"again:  {words}" for words in recovery_words(shown)]
    rows = [HEADER, *(number.cells for number in compared(shown))]
    lines += ["", *table_lines(rows, width=width)]
    if shown.plan.topology.on_cpu:
        lines += ["", NO_GPU]
    if shown.end is not None and shown.end.exit_code:
        lines += ["", f"why it failed: zerofit explain {typed_name(shown.run.folder)}"]
    return "\n".join(lines)
