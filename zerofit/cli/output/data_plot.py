"""Plots a length report: the distribution of lengths, and the tokens computed per epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.cli.draw_plot import save_figure
from zerofit.data.lengths.histogram import bins
from zerofit.data.lengths.report import PERCENTILES, LengthUnit

if TYPE_CHECKING:
    from pathlib import Path

    from zerofit.data.lengths.report import LengthReport

_MOST_BINS = 60
_SHADES = ("0.65", "0.45", "0.25", "0.0")
"""Of the percentile lines: the higher, the darker."""


def draw_lengths(report: LengthReport, path: Path) -> None:
    """Plot the histogram beside the bars of padding, and write the file.

    Raises:
        UserError: the file can't be written.
    """
    from matplotlib.figure import Figure

    measured, histogram = report.measured, report.measured.histogram
    samples = "sample" if histogram.num_samples == 1 else "samples"
    figure = Figure(figsize=(12.0, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_histogram(left, report)
    _draw_padding(right, report)
    figure.suptitle(
        f"{measured.subject}: {histogram.num_samples:,} {samples}, {histogram.num_tokens:,} "
        f"{measured.unit.value}\n{measured.counted}",
        fontsize=10,
    )
    save_figure(figure, path, dpi=150)


def _draw_histogram(axes: Any, report: LengthReport) -> None:
    histogram = report.measured.histogram
    found = bins(histogram, most=_MOST_BINS)
    regular = [bin_ for bin_ in found if not bin_.is_tail]
    width = regular[0].most - regular[0].least + 1
    starts, heights = [bin_.least for bin_ in regular], [bin_.num_samples for bin_ in regular]
    axes.bar(starts, heights, width=width, align="edge", color="tab:blue", edgecolor="white", linewidth=0.4)
    end = regular[-1].most + 1
    for tail in found[len(regular) :]:
        axes.bar(
            end + width,
            tail.num_samples,
            width=2 * width,
            align="edge",
            color="tab:orange",
            label=f"{tail.num_samples:,} up to {tail.most:,}",
        )
    for share, shade in zip(PERCENTILES, _SHADES, strict=True):
        length = histogram.percentile(share)
        axes.axvline(length, color=shade, linewidth=1, linestyle=":", label=f"p{share} {length:,}")
    if report.measured.unit is LengthUnit.TOKENS:
        length = report.choice.max_length
        is_within = length <= end + 3 * width
        axes.axvline(
            length if is_within else end + 3 * width,
            color="tab:red",
            linewidth=1.5,
            label=f"max_length {length:,}" + ("" if is_within else ", to the right"),
        )
    axes.set_xlabel(f"{report.measured.unit.value} of a sample")
    axes.set_ylabel("samples")
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    axes.yaxis.set_major_formatter(lambda samples, _: f"{samples:,.0f}")
    axes.legend(fontsize=8, framealpha=1, loc="upper right")


def _draw_padding(axes: Any, report: LengthReport) -> None:
    """Plot the tokens computed per epoch for each batching, as shares of the maximum."""
    most = max(row.cost.tokens for row in report.padding) or 1.0
    names = [row.way.value for row in report.padding]
    real = [row.cost.tokens * (1 - row.waste) / most for row in report.padding]
    padding = [row.cost.tokens * row.waste / most for row in report.padding]
    axes.barh(names, real, color="tab:green", label="samples")
    axes.barh(names, padding, left=real, color="0.8", label="padding")
    for place, row in enumerate(report.padding):
        total = row.cost.tokens / most
        axes.annotate(f" {total:.0%}", (total, place), va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18)
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}" if share <= 1 else "")
    axes.set_xlabel(f"{report.measured.unit.value} computed")
    size, length = report.setup.batch_size, report.choice.max_length
    axes.set_title(f"an epoch in batches of {size}, max_length {length:,}", fontsize=10)
    axes.legend(fontsize=8, loc="lower right")
