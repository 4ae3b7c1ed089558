"""Writes plots with matplotlib: what all of them need, and a plan's bars."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from zerofit.configs.write.write_files import check_can_write, write_bytes
from zerofit.core.errors import UserError
from zerofit.planning.plan_table import GROUPS

if TYPE_CHECKING:
    from pathlib import Path

    from zerofit.cli.output.plan_plot import Plot

_FLAG = "--plot FILE"
_COLOURS = {"W": "blue", "O": "purple", "G": "red", "A": "green", "B": "orange", "C": "gray"}
"""matplotlib's names, by the letter of the group."""


def check_can_plot(path: Path, *, force: bool) -> None:
    """Check early that --plot can be written: matplotlib is there, the ending known, the folder writable.

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
    bounds = [sum(bar.gib) if bar.is_bound else 0.0 for bar in plot.bars]
    if any(bounds):
        axes.bar(places, bounds, label="at least", color="white", edgecolor="gray", hatch="//")
    below = [0.0] * len(plot.bars)
    for index, group in enumerate(GROUPS):
        heights = [0.0 if bar.is_bound else bar.gib[index] for bar in plot.bars]
        axes.bar(places, heights, bottom=below, label=group.name, color=f"tab:{_COLOURS[group.letter]}")
        below = [low + height for low, height in zip(below, heights, strict=True)]
    errors = [bar.error_gib for bar in plot.bars]
    estimated = [place for place in places if not plot.bars[place].is_bound]
    axes.errorbar(
        estimated,
        [below[place] for place in estimated],
        yerr=[errors[place] for place in estimated],
        fmt="none",
        ecolor="black",
        capsize=4,
    )
    for place, bar in enumerate(plot.bars):
        top = (place, max(below[place] + errors[place], bounds[place]))
        axes.annotate(bar.note, top, xytext=(0, 3), textcoords="offset points", ha="center", fontsize=8)
    axes.axhline(plot.card_gib, color="black", label="GPU")
    axes.axhline(plot.usable_gib, color="black", linestyle="--", label="to be used")
    axes.set_xticks(places, [bar.label.replace(", ", "\n") for bar in plot.bars], fontsize=8)
    axes.set_ylabel("GiB on each GPU at its peak")
    axes.set_title(plot.title, fontsize=10)
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside right center", fontsize=8)
    save_figure(figure, path, dpi=150)
