"""Plots predictions against measurements with matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_truth.errors import LIMIT, Quantity, case_errors
from zerofit.cli.draw_plot import save_figure
from zerofit.core.units import GIB

if TYPE_CHECKING:
    from pathlib import Path

    from gpu_truth.results import Results

_MARKERS = {
    Quantity.ALLOCATED: "o",
    Quantity.RESERVED: "s",
    Quantity.DEVICE: "^",
    Quantity.WEIGHTS: "o",
    Quantity.GRADIENTS: "s",
    Quantity.OPTIMIZER_STATES: "^",
    Quantity.ACTIVATIONS: "D",
}
"""matplotlib's names; time is not drawn."""


def draw_scatter(results: Results, path: Path) -> None:
    """Draw one point a case and quantity of memory, on logarithmic axes, and write the file.

    Nothing is written where there is no point.

    Raises:
        ImportError: matplotlib is missing.
        UserError: the file can't be written.
    """
    from matplotlib.figure import Figure

    errors = [
        one
        for one in case_errors((*results.accuracy, *results.ranks))
        if one.quantity in _MARKERS and one.predicted
    ]
    if not errors:
        return
    figure = Figure(figsize=(7.0, 6.4), layout="constrained")
    axes = figure.subplots()
    groups = [*dict.fromkeys(one.group for one in errors)]
    for index, group in enumerate(groups):
        for quantity, marker in _MARKERS.items():
            found = [one for one in errors if (one.group, one.quantity) == (group, quantity)]
            measured = [one.measured / GIB for one in found]
            predicted = [one.predicted / GIB for one in found]
            axes.scatter(measured, predicted, marker=marker, s=22, alpha=0.7, color=f"C{index % 10}")
    sizes = [size / GIB for one in errors for size in (one.measured, one.predicted)]
    ends = [min(sizes), max(sizes)]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    for factor in (1 - LIMIT, 1 + LIMIT):
        axes.plot(ends, [end * factor for end in ends], color="black", linewidth=0.5, linestyle=":")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("measured, GiB")
    axes.set_ylabel("predicted, GiB")
    axes.set_title(
        f"{results.machine.device}, torch {results.versions.torch}, {results.date[:10]}", fontsize=10
    )
    drawn = [quantity for quantity in _MARKERS if any(one.quantity is quantity for one in errors)]
    for index, group in enumerate(groups):
        axes.scatter([], [], color=f"C{index % 10}", label=group)
    for quantity in drawn:
        axes.scatter([], [], color="0.4", marker=_MARKERS[quantity], label=quantity.value)
    figure.legend(loc="outside right center", fontsize=8, frameon=False)
    save_figure(figure, path, dpi=130)
