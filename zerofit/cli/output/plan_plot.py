"""A plan as plot: a stacked bar for each strategy, and a line for the GPU's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.cli.draw_plot import save_figure
from zerofit.cli.output.plan_rows import CHOSEN, PlanRow, plan_rows
from zerofit.core.units import GIB
from zerofit.planning.answer_lines import machine_words
from zerofit.planning.plan_labels import workload_words
from zerofit.planning.plan_table import GROUPS, grouped

if TYPE_CHECKING:
    from pathlib import Path

    from zerofit.planning.solve import Answer

_COLOURS = {
    "W": "#0072b2",
    "O": "#cc79a7",
    "G": "#d55e00",
    "A": "#009e73",
    "B": "#e69f00",
    "C": "#9a9a9a",
}
"""By the letter of the group. The colour-blind tell them apart: Okabe and Ito, https://jfly.uni-koeln.de/color/;
page.css has the same."""
_TOO_LARGE = "too large"
_TALLEST = 2.2
"""What is larger than so many GPUs is cut at the top: the others would be flat."""


def draw_plan(answer: Answer, path: Path) -> None:
    """Plot the user's own strategy, the choice, what would fit, and the others; write the file.

    Where layouts were compared, the best of each is drawn instead.

    Raises:
        UserError: the file can't be written.
    """
    from matplotlib.figure import Figure

    problem, rows = answer.problem, plan_rows(answer, has_variants=False)
    figure = Figure(figsize=(max(6.5, 2.4 + 1.35 * len(rows)), 5.2), layout="constrained")
    axes = figure.subplots()
    tops = [max(row.least_bytes, _upper(row)) / GIB for row in rows]
    height = 1.12 * min(max(*tops, problem.card_bytes / GIB), _TALLEST * problem.card_bytes / GIB)
    axes.set_ylim(0, height)
    _draw_limits(axes, answer, num_bars=len(rows))
    _draw_bars(axes, rows, height)
    for place, row in enumerate(rows):
        note = _note(answer, row)
        above: dict[str, Any] = {
            "xytext": (0, 4),
            "textcoords": "offset points",
            "ha": "center",
            "va": "bottom",
        }
        box: dict[str, Any] = {
            "boxstyle": "square,pad=0.15",
            "facecolor": "white",
            "edgecolor": "none",
            "alpha": 0.85,
        }
        if note:
            weight = "bold" if row.role.startswith(CHOSEN) else "normal"
            at = (place, min(tops[place], 0.93 * height))
            axes.annotate(note, at, fontsize=8, fontweight=weight, bbox=box, zorder=5, **above)
    labels = [f"{row.name}\n{row.batch}".replace(", ", "\n") for row in rows]
    axes.set_xticks(range(len(rows)), labels, fontsize=8)
    for row, tick in zip(rows, axes.get_xticklabels(), strict=True):
        tick.set_fontweight("bold" if row.role.startswith(CHOSEN) else "normal")
    axes.set_ylabel("GiB on each GPU at its peak")
    axes.spines[["top", "right"]].set_visible(False)
    title = f"{problem.model.name}, {workload_words(problem)}\n{machine_words(answer)}"
    axes.set_title(title, fontsize=10, parse_math=False)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    save_figure(figure, path, dpi=150)


def _upper(row: PlanRow) -> float:
    """Return the upper end of a strategy's memory."""
    return row.least_bytes if row.judged is None else row.judged.estimate.device.upper_bytes


def _draw_limits(axes: Any, answer: Answer, *, num_bars: int) -> None:
    """Draw what the GPU has and what may be used, with their names to the right of the bars."""
    card, kept = answer.problem.card_bytes / GIB, answer.problem.device_bytes / GIB
    axes.set_xlim(-0.6, num_bars - 0.4)
    axes.axhline(card, color="black", linewidth=1.2, zorder=3)
    axes.axhline(kept, color="black", linewidth=1, linestyle=(0, (6, 4)), zorder=3)
    place: dict[str, Any] = {
        "xytext": (4, 0),
        "textcoords": "offset points",
        "fontsize": 8,
        "annotation_clip": False,
    }
    end = num_bars - 0.4
    if card == kept:
        axes.annotate(f"GPU {card:.1f}", (end, card), va="center", **place)
        return
    axes.annotate(f"GPU {card:.1f}", (end, card), va="bottom", **place)
    axes.annotate(f"available {kept:.1f}", (end, kept), va="top", **place)


def _draw_bars(axes: Any, rows: tuple[PlanRow, ...], height: float) -> None:
    """Draw each strategy's terms by group, its ± as an upright line, and lower bounds as hatched bars.

    The ± has no ends that lie: beside the GPU's line they would look like a part of it.
    """
    bounds = {place: row.least_bytes / GIB for place, row in enumerate(rows) if row.judged is None}
    if bounds:
        at_least = list(bounds.values())
        axes.bar(
            list(bounds), at_least, label="at least", color="white", edgecolor="gray", hatch="//", zorder=2
        )
    known = [(place, row.judged.estimate.device) for place, row in enumerate(rows) if row.judged is not None]
    places = [place for place, _ in known]
    sizes = [dict(grouped(device.peak)) for _, device in known]
    tops = [0.0] * len(known)
    for group in GROUPS:
        heights = [size.get(group, 0) / GIB for size in sizes]
        style: dict[str, Any] = {
            "color": _COLOURS[group.letter],
            "edgecolor": "white",
            "linewidth": 0.5,
            "zorder": 2,
        }
        axes.bar(places, heights, bottom=tops, label=f"{group.letter}  {group.name}", **style)
        for place, bottom, size in zip(places, tops, heights, strict=True):
            if size > 0.035 * height:
                colour = "white" if group.letter == "W" else "black"
                at: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8, "clip_on": True}
                axes.text(place - 0.25, bottom + size / 2, group.letter, color=colour, zorder=3, **at)
        tops = [top + size for top, size in zip(tops, heights, strict=True)]
    lows = [device.lower_bytes / GIB for _, device in known]
    highs = [device.upper_bytes / GIB for _, device in known]
    axes.vlines(places, lows, highs, color="black", linewidth=2, zorder=4, label="±")
    chosen = [place for place, row in enumerate(rows) if row.role.startswith(CHOSEN)]
    for place in chosen:
        top = next(top for known_place, top in zip(places, tops, strict=True) if known_place == place)
        axes.bar([place], [top], fill=False, edgecolor="black", linewidth=2, zorder=3)


def _note(answer: Answer, row: PlanRow) -> str:
    """Return what stands above a bar: its role in lines, or that it is too large."""
    if row.role:
        words = row.role.replace(": ", ":\n").replace("with --", "with\n--")
        return words if row.fits else f"{words}:\n{_TOO_LARGE}"
    if row.judged is None:
        return _TOO_LARGE
    if answer.screen is not None and not answer.layouts:
        return row.verdict
    if row.fits:
        return ""
    is_on_gpu = row.judged.estimate.device.peak_bytes > answer.problem.device_bytes
    return _TOO_LARGE if is_on_gpu else f"{_TOO_LARGE}\nfor the host"
