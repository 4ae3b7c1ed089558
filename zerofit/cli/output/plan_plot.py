"""A plan as the content of a plot: a stacked bar for each strategy against the line of what the GPU has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.core.units import GIB
from zerofit.planning.plan_table import GROUPS, grouped, machine_words
from zerofit.planning.plan_words import batch, kind_label, label, workload_words

if TYPE_CHECKING:
    from zerofit.planning.search import EstimatedStrategy
    from zerofit.planning.solve import Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotBar:
    """One strategy."""

    label: str
    gib: tuple[float, ...]
    """One number for each of GROUPS."""
    error_gib: float
    """The uncertainty of the sum, each way; 0 where the sum is a lower bound."""
    is_bound: bool = False
    """True if no more is known than that it needs at least so much, which is too large."""
    note: str = ""
    """The label above the bar: the choice, or too large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """All that is drawn."""

    title: str
    bars: tuple[PlotBar, ...]
    card_gib: float
    """GPU memory that a process can get."""
    usable_gib: float
    """The part of it that a plan may use."""


_TOO_LARGE = "too large"


def _note(answer: Answer, judged: EstimatedStrategy) -> str:
    if judged.fits:
        return "chosen" if judged is answer.head else ""
    is_on_gpu = judged.estimate.device.peak_bytes > answer.problem.device_bytes
    return _TOO_LARGE if is_on_gpu else f"{_TOO_LARGE}\nfor the host"


def plan_plot(answer: Answer) -> Plot:
    """Return the bars of the choice, of the best of every other kind, and of what is too large at once."""
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
                note=_note(answer, judged),
            )
        )
    for one in answer.found.ruled_out:
        bars.append(
            PlotBar(
                label=kind_label(one.strategy, problem.topology),
                gib=(one.least_bytes / GIB,),
                error_gib=0.0,
                is_bound=True,
                note=_TOO_LARGE,
            )
        )
    return Plot(
        title=f"{problem.model.name}, {workload_words(problem.workload)}\n{machine_words(answer)}",
        bars=tuple(bars),
        card_gib=problem.card_bytes / GIB,
        usable_gib=problem.device_bytes / GIB,
    )
