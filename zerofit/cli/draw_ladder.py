"""Draws a LadderPlot with matplotlib into a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.cli.draw_plot import save_figure
from zerofit.cli.output.ladder_plot import PART_WORDS

if TYPE_CHECKING:
    from pathlib import Path

    from zerofit.cli.output.ladder_plot import LadderPlot

_PART_COLOURS = ("tab:blue", "tab:red", "tab:purple", "tab:green")
"""As in zerofit plan's plot: weights, gradients, optimizer, activations."""
_HEIGHT = 0.36
"""Of one bar; a rung takes two, of the 1.0 that it has."""
_HOLDS_WORDS = 0.1
"""Of the longest bar, what a bar needs for its size to stand in its beginning: marks stand near its end."""


def draw_ladder(plot: LadderPlot, path: Path) -> None:
    """Draw memory on the left and time on the right, a rung each line, and write the file.

    Raises:
        UserError: the file can't be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 1.9 + 0.72 * len(plot.bars)), layout="constrained")
    memory, time = figure.subplots(1, 2, sharey=True, gridspec_kw={"width_ratios": [3, 2]})
    _draw_memory(memory, plot)
    _draw_time(time, plot)
    figure.suptitle(plot.title, fontsize=10)
    handles, labels = memory.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    save_figure(figure, path, dpi=110)


def _draw_memory(axes: Any, plot: LadderPlot) -> None:
    places = range(len(plot.bars))
    upper = [place - _HEIGHT / 2 for place in places]
    lower = [place + _HEIGHT / 2 for place in places]
    done = [(place, bar) for place, bar in zip(places, plot.bars, strict=True) if bar.measured is not None]
    measured = [bar.measured or 0.0 for bar in plot.bars]
    axes.barh(upper, measured, height=_HEIGHT, color="0.45", label=plot.measured_words)
    begin = [0.0] * len(plot.bars)
    for index, (words, colour) in enumerate(zip(PART_WORDS, _PART_COLOURS, strict=True)):
        sizes = [bar.parts[index] if bar.parts else 0.0 for bar in plot.bars]
        axes.barh(lower, sizes, left=begin, height=_HEIGHT, color=colour, label=f"counted: {words}")
        begin = [start + size for start, size in zip(begin, sizes, strict=True)]
    _mark(axes, [(upper[at], bar.predicted) for at, bar in done], "|", plot.predicted_words)
    _mark(axes, [(upper[at], bar.published) for at, bar in done], "D", 'published, "G" as GiB')
    for place, bar in zip(places, plot.bars, strict=True):
        if bar.measured is None:
            axes.text(0, place, f" {bar.note}", va="center", fontsize=8, style="italic")
        else:
            size = f"{bar.measured:.1f}" if plot.unit == "GiB" else f"{bar.measured:.0f}"
            is_wide = bar.measured > _HOLDS_WORDS * max(measured)
            start, colour = (0.0, "white") if is_wide else (bar.measured, "black")
            axes.text(start, upper[place], f" {size}", color=colour, va="center", fontsize=8)
    axes.set_yticks(places, [bar.label for bar in plot.bars], fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{plot.unit} at the peak")


def _mark(axes: Any, points: list[tuple[float, float | None]], marker: str, words: str) -> None:
    """Draw marks where there is a figure."""
    known = [(place, size) for place, size in points if size is not None]
    if known:
        sizes, places = [size for _, size in known], [place for place, _ in known]
        axes.scatter(sizes, places, marker=marker, s=60, color="black", label=words, zorder=3)


def _draw_time(axes: Any, plot: LadderPlot) -> None:
    times = [bar.step_time_s or 0.0 for bar in plot.bars]
    axes.barh(range(len(times)), times, height=2 * _HEIGHT, color="tab:orange")
    for place, bar in enumerate(plot.bars):
        if bar.step_time_s is not None:
            words = f" {bar.step_time_s:.3g} s, {bar.losses}"
            axes.text(bar.step_time_s, place, words, va="center", fontsize=8)
    axes.tick_params(axis="y", left=False)
    axes.set_xlim(0, 1.9 * max(times, default=1.0) or 1.0)
    axes.set_xlabel("seconds a step, and the loss of the warm-up")
