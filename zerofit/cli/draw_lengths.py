"""Draws a LengthPlot with matplotlib into a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.cli.draw_plot import save_figure

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from zerofit.render.data_plot import LengthPlot

_SHADES = ("0.65", "0.45", "0.25", "0.0")
"""Of the lines at percentiles: the higher, the darker."""


def draw_lengths(plot: LengthPlot, path: Path) -> None:
    """Draw the histogram beside the bars of padding, and write the file.

    Raises:
        UserError: the file can't be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.0, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_histogram(left, plot)
    _draw_bars(right, plot)
    figure.suptitle(plot.title, fontsize=10)
    save_figure(figure, path, dpi=150)


def _draw_histogram(axes: Any, plot: LengthPlot) -> None:
    regular = [one for one in plot.bins if not one.is_tail]
    width = regular[0].most - regular[0].least + 1
    axes.bar(
        [one.least for one in regular],
        [one.num_samples for one in regular],
        width=width,
        align="edge",
        color="tab:blue",
        edgecolor="white",
        linewidth=0.4,
    )
    end = regular[-1].most + 1
    for tail in (one for one in plot.bins if one.is_tail):
        axes.bar(end + width, tail.num_samples, width=2 * width, align="edge", color="tab:orange")
        label = f"{tail.num_samples:,} up to {tail.most:,}"
        axes.annotate(
            label,
            (end + 2 * width, tail.num_samples),
            xytext=(0, 4),
            textcoords="offset points",
            rotation=90,
            ha="center",
            va="bottom",
            fontsize=8,
            color="tab:orange",
        )
    for (name, length), shade in zip(plot.marks, _SHADES, strict=True):
        axes.axvline(length, color=shade, linewidth=1, linestyle=":", label=f"{name} {length:,}")
    if plot.max_length is not None:
        label = f"max_length {plot.max_length:,}"
        if plot.max_length <= end + 3 * width:
            axes.axvline(plot.max_length, color="tab:red", linewidth=1.5, label=label)
        else:
            axes.plot([], [], color="tab:red", linewidth=1.5, label=f"{label}, to the right")
    axes.set_xlabel(f"{plot.unit} of a sample")
    axes.set_ylabel("samples")
    axes.yaxis.set_major_formatter(lambda samples, _: f"{samples:,.0f}")
    axes.legend(fontsize=8, framealpha=1, loc="upper right")


def _draw_bars(axes: Any, plot: LengthPlot) -> None:
    names = [bar.label for bar in plot.bars]
    axes.barh(names, [bar.real for bar in plot.bars], color="tab:green", label="samples")
    axes.barh(
        names,
        [bar.padding for bar in plot.bars],
        left=[bar.real for bar in plot.bars],
        color="0.8",
        label="padding",
    )
    for place, bar in enumerate(plot.bars):
        total = bar.real + bar.padding
        axes.annotate(f" {total:.0%}", (total, place), va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18)
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}" if share <= 1 else "")
    axes.set_xlabel(f"{plot.unit} computed")
    axes.set_title(plot.bars_title, fontsize=10)
    axes.legend(fontsize=8, loc="lower right")
