"""A ladder as the content of a plot: for each rung its memory, measured, counted and predicted, and time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.cli.output.ladder_table import PARTS, head_words, not_done_words, part_sizes, unit_of
from zerofit.core.units import GIB
from zerofit.measuring.results import peak_of

if TYPE_CHECKING:
    from zerofit.measuring.results import Ladder, Measured, RungResult

_MOST_REASON = 72
"""Characters of the reason that fit beside a bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderBar:
    """One rung; sizes in the plot's unit."""

    label: str
    measured: float | None
    """Peak; None where the rung did not run to its end."""
    parts: tuple[float, ...]
    """What its tensors hold, one number for each of PARTS; empty where not counted."""
    predicted: float | None
    published: float | None
    step_time_s: float | None
    losses: str
    """The first and the last; empty where not measured, or of no use among many ranks."""
    note: str
    """Why it is not done; empty where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderPlot:
    """All that is drawn."""

    title: str
    unit: str
    measured_words: str
    """What the measured bars are."""
    predicted_words: str
    bars: tuple[LadderBar, ...]
    """From top to bottom."""


PART_WORDS = tuple(words for _, words, _ in PARTS)


def ladder_plot(ladder: Ladder) -> LadderPlot:
    """Return a ladder as a plot."""
    unit, num_bytes = unit_of(ladder)
    on = f"{ladder.device}, torch {ladder.versions.torch}"
    return LadderPlot(
        title=f"{head_words(ladder)}\n{on}",
        unit=unit,
        measured_words="measured: process, over imports" if ladder.on_cpu else "measured: torch, allocated",
        predicted_words=f"predicted for {ladder.predicted_for}" if ladder.on_cpu else "predicted",
        bars=tuple(_bar(ladder, rung, num_bytes) for rung in ladder.rungs),
    )


def _bar(ladder: Ladder, rung: RungResult, unit: int) -> LadderBar:
    measured, predicted = rung.measured, rung.predicted
    counted: tuple[float, ...] = ()
    if measured and measured.counted:
        counted = tuple((size or 0) / unit for size in part_sizes(measured.counted))
    expected = None
    if predicted:
        expected = predicted.device_bytes if ladder.on_cpu else predicted.allocated_bytes
    note = not_done_words(rung)
    return LadderBar(
        label=rung.label,
        measured=peak_of(measured) / unit if measured else None,
        parts=counted,
        predicted=None if expected is None else expected / unit,
        published=rung.published.memory_g * GIB / unit if rung.published else None,
        step_time_s=measured.step_time_s if measured else None,
        losses=_losses(ladder, measured),
        note=note if len(note) <= _MOST_REASON else f"{note[: _MOST_REASON - 3]}...",
    )


def _losses(ladder: Ladder, measured: Measured | None) -> str:
    if measured is None or ladder.num_ranks > 1:
        return ""
    return f"loss {measured.losses[0]:.3f} to {measured.losses[-1]:.3f}"
