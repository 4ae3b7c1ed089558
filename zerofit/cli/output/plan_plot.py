"""A plan as the content of a plot: a stacked bar for each strategy against the line of what the GPU has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.core.units import GIB
from zerofit.planning.plan_table import GROUPS, grouped, machine_words
from zerofit.planning.plan_words import batch, label, workload_words

if TYPE_CHECKING:
    from zerofit.planning.answer import Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotBar:
    """One strategy."""

    label: str
    gib: tuple[float, ...]
    """One number for each of GROUPS."""
    error_gib: float
    """The uncertainty of the sum, each way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """All that is drawn."""

    title: str
    bars: tuple[PlotBar, ...]
    card_gib: float
    """What a process can get of the GPU."""
    usable_gib: float
    """What a plan may take of it."""


def plan_plot(answer: Answer) -> Plot:
    """Return the bars of the choice and of the best of every other kind."""
    problem = answer.problem
    bars = []
    for judged in (answer.head, *answer.found.others):
        device = judged.estimate.device
        sizes = dict(grouped(device.peak))
        bars.append(
            PlotBar(
                label=f"{label(judged.strategy, problem.topology)}\n{batch(judged.strategy)}",
                gib=tuple(sizes.get(group, 0) / GIB for group in GROUPS),
                error_gib=device.peak_bytes * device.uncertainty / GIB,
            )
        )
    return Plot(
        title=f"{problem.model.name}, {workload_words(problem.workload)}\n{machine_words(answer)}",
        bars=tuple(bars),
        card_gib=problem.card_bytes / GIB,
        usable_gib=problem.device_bytes / GIB,
    )
