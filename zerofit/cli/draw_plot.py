"""Draws a Plot with matplotlib into a file."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from zerofit.configs.write.write_files import check_can_write, write_bytes
from zerofit.core.errors import UserError
from zerofit.planning.plan_table import GROUPS

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from zerofit.cli.output.data_plot import LengthPlot
    from zerofit.cli.output.plan_plot import Plot


_FLAG = "--plot FILE"


def check_can_plot(path: Path, *, force: bool) -> None:
    """Return when a plot can be drawn into a file of this name; to be asked before anything takes time.

    Args:
        path: the file.
        force: whether to write over one that is there.

    Raises:
        UserError: matplotlib is missing, it does not know the file's ending, a file is there, or its folder
            can't be written.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise UserError(
            "plots-missing",
            "plots need matplotlib",
            found=f"--plot {path}, and no matplotlib in this environment",
            why="zerofit does not bring it, as only plots need it",
            fix="pip install 'zerofit[plots]', or leave out --plot",
        ) from None
    endings = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lstrip(".").lower() not in endings:
        raise UserError(
            "plot-format-unknown",
            "the plot's file has no ending that says its format",
            found=f"--plot {path}",
            why=f"matplotlib writes {', '.join(endings)}",
            fix=f"name it {path.with_suffix('.png')}",
        )
    check_can_write(path, force=force, flag=_FLAG)


def save_figure(figure: Any, path: Path, *, dpi: int) -> None:
    """Write a figure of matplotlib into a file, making its folder.

    Raises:
        UserError: the file can't be written.
    """
    picture = io.BytesIO()
    figure.savefig(picture, dpi=dpi, format=path.suffix.lstrip(".").lower())
    write_bytes(path, picture.getvalue(), flag=_FLAG)


def draw_plot(plot: Plot, path: Path) -> None:
    """Draw the bars, from left to right as in the table, and write the file.

    Raises:
        UserError: the file can't be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 1.6 * len(plot.bars)), 5.0), layout="constrained")
    axes = figure.subplots()
    places = range(len(plot.bars))
    below = [0.0] * len(plot.bars)
    for index, group in enumerate(GROUPS):
        heights = [bar.gib[index] for bar in plot.bars]
        axes.bar(places, heights, bottom=below, label=group.name, color=f"tab:{_COLOURS[group.letter]}")
        below = [low + height for low, height in zip(below, heights, strict=True)]
    errors = [bar.error_gib for bar in plot.bars]
    axes.errorbar(places, below, yerr=errors, fmt="none", ecolor="black", capsize=4)
    axes.axhline(plot.card_gib, color="black", label="GPU")
    axes.axhline(plot.usable_gib, color="black", linestyle="--", label="to be used")
    axes.set_xticks(places, [bar.label.replace(", ", "\n") for bar in plot.bars], fontsize=8)
    axes.set_ylabel("GiB on each GPU at its peak")
    axes.set_title(plot.title, fontsize=10)
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside right center", fontsize=8)
    save_figure(figure, path, dpi=150)


_COLOURS = {"W": "blue", "O": "purple", "G": "red", "A": "green", "B": "orange", "C": "gray"}
"""matplotlib's names, by the letter of the group."""


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
