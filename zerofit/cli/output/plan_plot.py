"""A plan as plot: a stacked bar for each strategy, and a line for the GPU's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.cli.draw_plot import save_figure
from zerofit.core.units import GIB
from zerofit.planning.answer_lines import machine_words
from zerofit.planning.plan_labels import batch, kind_label, label, workload_words
from zerofit.planning.plan_table import GROUPS, grouped

if TYPE_CHECKING:
    from pathlib import Path

    from zerofit.planning.search import EstimatedStrategy
    from zerofit.planning.solve import Answer

_COLOURS = {"W": "blue", "O": "purple", "G": "red", "A": "green", "B": "orange", "C": "gray"}
"""matplotlib's colour names, by the letter of the group."""
_TOO_LARGE = "too large"


def draw_plan(answer: Answer, path: Path) -> None:
    """Plot the choice, the best of every other kind, and those clearly too large; write the file.

    Where layouts were compared, the best of each is drawn instead.

    Raises:
        UserError: the file can't be written.
    """
    from matplotlib.figure import Figure

    problem, found = answer.problem, answer.found
    shown = [(other, problem.topology) for other in (answer.head, *found.others)]
    ruled_out = found.ruled_out
    if answer.layouts:
        shown = [
            (layout.best, layout.problem.topology) for layout in answer.layouts if layout.best is not None
        ]
        ruled_out = ()
    estimated = tuple(judged for judged, _ in shown)
    figure = Figure(figsize=(max(6.0, 1.6 * (len(estimated) + len(ruled_out))), 5.0), layout="constrained")
    axes = figure.subplots()
    if ruled_out:
        _draw_bounds(axes, [out.least_bytes / GIB for out in ruled_out], first=len(estimated))
    _draw_estimates(axes, answer, estimated)
    axes.axhline(problem.card_bytes / GIB, color="black", label="GPU")
    axes.axhline(problem.device_bytes / GIB, color="black", linestyle="--", label="available")
    labels = [f"{label(judged.strategy, topology)}\n{batch(judged.strategy)}" for judged, topology in shown]
    labels += [kind_label(out.strategy, problem.topology) for out in ruled_out]
    axes.set_xticks(range(len(labels)), [text.replace(", ", "\n") for text in labels], fontsize=8)
    axes.set_ylabel("GiB on each GPU at its peak")
    title = f"{problem.model.name}, {workload_words(problem)}\n{machine_words(answer)}"
    axes.set_title(title, fontsize=10)
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside right center", fontsize=8)
    save_figure(figure, path, dpi=150)


def _draw_bounds(axes: Any, sizes: list[float], *, first: int) -> None:
    """Plot the lower bounds of strategies that are too large by their bound alone."""
    places = range(first, first + len(sizes))
    axes.bar(places, sizes, label="at least", color="white", edgecolor="gray", hatch="//")
    for place, size in zip(places, sizes, strict=True):
        _write_above(axes, place, size, _TOO_LARGE)


def _draw_estimates(axes: Any, answer: Answer, estimated: tuple[EstimatedStrategy, ...]) -> None:
    devices = [strategy.estimate.device for strategy in estimated]
    sizes = [dict(grouped(device.peak)) for device in devices]
    tops = [0.0] * len(estimated)
    for group in GROUPS:
        heights = [size.get(group, 0) / GIB for size in sizes]
        colour = f"tab:{_COLOURS[group.letter]}"
        axes.bar(range(len(tops)), heights, bottom=tops, label=group.name, color=colour)
        tops = [top + height for top, height in zip(tops, heights, strict=True)]
    errors = [device.peak_bytes * device.uncertainty / GIB for device in devices]
    axes.errorbar(range(len(tops)), tops, yerr=errors, fmt="none", ecolor="black", capsize=4)
    for place, judged in enumerate(estimated):
        _write_above(axes, place, tops[place] + errors[place], _note(answer, judged))


def _write_above(axes: Any, place: int, height: float, note: str) -> None:
    axes.annotate(note, (place, height), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=8)


def _note(answer: Answer, judged: EstimatedStrategy) -> str:
    if judged.fits:
        return "chosen" if judged == answer.chosen else ""
    is_on_gpu = judged.estimate.device.peak_bytes > answer.problem.device_bytes
    return _TOO_LARGE if is_on_gpu else f"{_TOO_LARGE}\nfor the host"
