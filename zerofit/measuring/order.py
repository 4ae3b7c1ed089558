"""A ladder that is to be measured, rung by rung."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.measuring.parent import Place, run_rung
from zerofit.measuring.results import Ladder, RungResult, RungState
from zerofit.measuring.rungs import climb, published_of
from zerofit.measuring.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from zerofit.core.facts import GpuSpec, Versions
    from zerofit.measuring.results import Outcome, Predicted
    from zerofit.measuring.rungs import Run, Rung, Step
    from zerofit.models.source import ModelSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be measured, and how."""

    said_model: str
    """As the user named it."""
    model: ModelSource
    base: Run
    """What the ladder starts from."""
    rungs: tuple[Rung, ...]
    is_cumulative: bool
    device: str
    """Name of the GPU, or CPU."""
    on_cpu: bool
    num_steps: int
    """Optimizer steps that are timed, on each rung."""
    limit_s: float
    """How long one rung may take."""
    versions: Versions

    @property
    def steps(self) -> tuple[Step, ...]:
        """What each rung runs under, if all can run."""
        return climb(self.rungs, self.base, is_cumulative=self.is_cumulative)

    def measure(self, folder: Path) -> Iterator[tuple[Step, Outcome | None]]:
        """Run each rung in a fresh process, one after another.

        One that can't run here is left out of those that stand on it. One that ran out of memory is not: what
        follows may mend that.

        Args:
            folder: takes the files of the processes.

        Yields:
            Each rung with None before it runs, and with how it ended after it.

        Raises:
            InterruptedRungError: Ctrl-C.
        """
        below = self.base
        for number, rung in enumerate(self.rungs, 1):
            (step,) = climb([rung], self.base, is_cumulative=self.is_cumulative, before=below)
            yield step, None
            outcome = run_rung(
                self._spec(step, folder, number), self._place(step, folder, number), limit_s=self.limit_s
            )
            yield step, outcome
            below = step.before if outcome.state is RungState.CANNOT_RUN else step.run

    def _place(self, step: Step, folder: Path, number: int) -> Place:
        return Place(folder=folder, name=f"{number:02}-{step.rung.name}")

    def _spec(self, step: Step, folder: Path, number: int) -> Spec:
        return Spec(
            model=self.said_model,
            task=self.model.task.value,
            strategy=step.run.strategy,
            sequence_length=step.run.sequence_length,
            full_length=max(self.base.sequence_length, step.run.sequence_length),
            num_steps=self.num_steps,
            on_cpu=self.on_cpu,
            weights=step.run.weights,
            num_ranks=step.run.num_ranks,
            result_file=str(self._place(step, folder, number).result),
        )

    def ladder(
        self,
        measured: Sequence[tuple[Step, Outcome]],
        predicted: Sequence[Predicted | None],
        *,
        predicted_for: GpuSpec | None,
    ) -> Ladder:
        """Return the ladder with what was measured and predicted, one of each a rung."""
        return Ladder(
            model=self.model.name,
            architecture=self.model.facts.architecture,
            num_parameters=self.model.facts.num_parameters,
            batch_size=self.base.batch_size,
            num_ranks=self.base.num_ranks,
            sequence_length=self.base.sequence_length,
            device=self.device,
            is_cumulative=self.is_cumulative,
            predicted_for=predicted_for.name if predicted_for else None,
            versions=self.versions,
            rungs=tuple(
                RungResult(
                    name=step.rung.name,
                    label=step.label,
                    strategy=step.run.strategy,
                    sequence_length=step.run.sequence_length,
                    outcome=outcome,
                    predicted=figures,
                    published=published_of(self.model.name, self.base, step.run),
                )
                for (step, outcome), figures in zip(measured, predicted, strict=True)
            ),
        )
