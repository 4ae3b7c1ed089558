"""A ladder as plot: memory on the left, measured, counted and predicted; time on the right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.cli.draw_plot import save_figure
from zerofit.cli.output.ladder_table import PARTS, head_words, not_done_words, part_sizes, unit_of
from zerofit.core.units import GIB
from zerofit.measuring.results import peak_of

if TYPE_CHECKING:
    from pathlib import Path

    from zerofit.measuring.ladder import Ladder

_PART_COLOURS = ("tab:blue", "tab:red", "tab:purple", "tab:green")
"""As in the plot of zerofit plan: weights, gradients, optimizer, activations."""
_HEIGHT = 0.36
"""Of one bar; a rung has two, of its total of 1.0."""
_HOLDS_WORDS = 0.1
"""Minimum share of the longest bar for a label inside a bar; marks are near its end."""
_MOST_REASON = 72
"""Maximum characters of the reason beside a bar."""


def draw_ladder(ladder: Ladder, path: Path) -> None:
    """Plot a ladder, one rung per row, and write the file.

    Raises:
        UserError: the file can't be written.
    """
    save_figure(ladder_figure(ladder), path, dpi=110)


def ladder_figure(ladder: Ladder) -> Any:
    """Return a ladder as matplotlib figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 1.9 + 0.72 * len(ladder.rungs)), layout="constrained")
    memory, time = figure.subplots(1, 2, sharey=True, gridspec_kw={"width_ratios": [3, 2]})
    _draw_memory(memory, ladder)
    _draw_time(time, ladder)
    figure.suptitle(
        f"{head_words(ladder)}\n{ladder.device}, torch {ladder.versions.torch}",
        fontsize=10,
    )
    handles, labels = memory.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def _draw_memory(axes: Any, ladder: Ladder) -> None:
    unit, num_bytes = unit_of(ladder)
    rungs = ladder.rungs
    peaks = [peak_of(rung.measured) / num_bytes if rung.measured else 0.0 for rung in rungs]
    upper, lower = ([place + side * _HEIGHT / 2 for place in range(len(rungs))] for side in (-1, 1))
    label = "measured: process, above imports" if ladder.on_cpu else "measured: torch, allocated"
    axes.barh(upper, peaks, height=_HEIGHT, color="0.45", label=label)
    begin = [0.0] * len(rungs)
    counted = [part_sizes(rung.measured.counted if rung.measured else None) for rung in rungs]
    for index, ((_, words, _), colour) in enumerate(zip(PARTS, _PART_COLOURS, strict=True)):
        sizes = [(parts[index] or 0) / num_bytes for parts in counted]
        axes.barh(lower, sizes, left=begin, height=_HEIGHT, color=colour, label=f"counted: {words}")
        begin = [start + size for start, size in zip(begin, sizes, strict=True)]
    field = "device_bytes" if ladder.on_cpu else "allocated_bytes"
    predicted = [getattr(rung.predicted, field, None) if rung.measured else None for rung in rungs]
    published = [
        rung.published.memory_g * GIB if rung.measured and rung.published else None for rung in rungs
    ]
    said = f"predicted for {ladder.predicted_for}" if ladder.on_cpu else "predicted"
    for figures, marker, words in ((predicted, "|", said), (published, "D", 'published, "G" as GiB')):
        known = [(size / num_bytes, place) for size, place in zip(figures, upper, strict=True) if size]
        if known:
            axes.scatter(*zip(*known, strict=True), marker=marker, s=60, color="black", label=words, zorder=3)
    for place, (rung, peak) in enumerate(zip(rungs, peaks, strict=True)):
        if rung.measured is None:
            note = not_done_words(rung)
            note = note if len(note) <= _MOST_REASON else f"{note[: _MOST_REASON - 3]}..."
            axes.text(0, place, f" {note}", va="center", fontsize=8, style="italic")
        else:
            size = f"{peak:.1f}" if unit == "GiB" else f"{peak:.0f}"
            start, colour = (0.0, "white") if peak > _HOLDS_WORDS * max(peaks) else (peak, "black")
            axes.text(start, upper[place], f" {size}", color=colour, va="center", fontsize=8)
    axes.set_yticks(range(len(rungs)), [rung.label for rung in rungs], fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{unit} at the peak")


def _draw_time(axes: Any, ladder: Ladder) -> None:
    times = [rung.measured.step_time_s if rung.measured else 0.0 for rung in ladder.rungs]
    axes.barh(range(len(times)), times, height=2 * _HEIGHT, color="tab:orange")
    for place, rung in enumerate(ladder.rungs):
        if rung.measured is not None:
            losses = rung.measured.losses
            words = f" {rung.measured.step_time_s:.3g} s, "
            if ladder.num_ranks == 1:  # losses of ranks that exchange nothing are meaningless
                words += f"loss {losses[0]:.3f} to {losses[-1]:.3f}"
            axes.text(rung.measured.step_time_s, place, words, va="center", fontsize=8)
    axes.tick_params(axis="y", left=False)
    axes.set_xlim(0, 1.9 * max(times, default=1.0) or 1.0)
    axes.set_xlabel("seconds per step, and the loss of the warm-up")
