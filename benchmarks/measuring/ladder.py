"""The published ladder of strategies, as the harness measures it: results, and the published figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from measuring.results import TrialMeasurement, TrialOutcome, TrialPrediction
from zerofit.core.facts import Versions
from zerofit.core.strategy import Strategy
from zerofit.launching.rungs import ON_ONE_RANK, climb, parse_rungs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerofit.launching.rungs import LadderRun, LadderStep
    from zerofit.models.source import ModelSource

PUBLISHED_MODEL, PUBLISHED_BATCH, PUBLISHED_LENGTH = "chinese-macbert-large", 32, 128
CPU = "CPU"
"""A ladder's device name for the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Published measurements of one rung, for the same model and sizes."""

    memory_g: float
    """As printed, in "G"."""
    epoch_time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RungResult:
    """One rung."""

    name: str
    """The user's name for it."""
    label: str
    """Its label: "+ Adafactor"."""
    strategy: Strategy
    """All settings, from its own change and those before it."""
    sequence_length: int
    outcome: TrialOutcome
    predicted: TrialPrediction | None = None
    published: Published | None = None

    @property
    def measured(self) -> TrialMeasurement | None:
        """Its measurements; None unless it completed."""
        return self.outcome.measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """A whole ladder on one machine."""

    model: str
    architecture: str
    num_parameters: int
    batch_size: int
    """Samples per optimizer step on the measured rank, equal for all rungs."""
    sequence_length: int
    """Tokens per sample, unless a rung changes it."""
    device: str
    """The GPU's name, or "CPU"."""
    is_cumulative: bool
    """True if each rung is on top of those before it."""
    predicted_for: str | None
    """The GPU of the prediction; None without one."""
    versions: Versions
    rungs: tuple[RungResult, ...]
    num_ranks: int = 1
    """Data-parallel ranks; the published ladder has one."""
    version: int = 1
    """Of this file format; raised whenever older files can no longer be read correctly."""

    @property
    def on_cpu(self) -> bool:
        """True if it was measured on the CPU."""
        return self.device == CPU


def make_ladder(
    model: ModelSource,
    base: LadderRun,
    measured: Sequence[tuple[LadderStep, TrialOutcome]],
    predicted: Sequence[TrialPrediction | None],
    **others: Any,
) -> Ladder:
    """Return the ladder of measurements and predictions, one of each per rung.

    Args:
        model: the model.
        base: the starting point.
        measured: each rung and its outcome.
        predicted: for each rung; None without a prediction.
        others: the other fields of Ladder.
    """
    return Ladder(
        model=model.name,
        architecture=model.facts.architecture,
        num_parameters=model.facts.num_parameters,
        batch_size=base.batch_size,
        sequence_length=base.sequence_length,
        rungs=tuple(
            RungResult(
                name=step.rung.name,
                label=step.label,
                strategy=step.run.strategy,
                sequence_length=step.run.sequence_length,
                outcome=outcome,
                predicted=figures,
                published=published_of(model.name, base, step.run),
            )
            for (step, outcome), figures in zip(measured, predicted, strict=True)
        ),
        **others,
    )


def published_of(model: str, base: LadderRun, run: LadderRun) -> Published | None:
    """Return the published measurements of a run with the same model, sizes and strategy, or None.

    Args:
        model: its name in the catalog.
        base: the ladder's starting point.
        run: one of its runs.
    """
    sizes = (model, base.batch_size, base.sequence_length)
    if sizes != (PUBLISHED_MODEL, PUBLISHED_BATCH, PUBLISHED_LENGTH):
        return None
    steps = climb(parse_rungs(ON_ONE_RANK), base, is_cumulative=True)
    found = (figures for step, figures in zip(steps, _PUBLISHED, strict=True) if step.run == run)
    return next(found, None)


_PUBLISHED = tuple(
    Published(memory_g=memory_g, epoch_time_s=epoch_time_s)
    for memory_g, epoch_time_s in (
        (15.1, 44.1),
        (7.5, 122.0),
        (7.3, 461.0),
        (5.5, 455.0),
        (3.5, 119.0),
        (3.4, 110.0),
    )
)
"""Memory and time per epoch of chinese-macbert-large as measured by its author, for each rung of ON_ONE_RANK.
Neither GPU nor versions are stated, nor whether "G" is GiB or GB."""
