"""A length report as the content of a plot: how long samples are, and what an epoch computes each way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.data.lengths.histogram import Bin, bins
from zerofit.data.lengths.report import PERCENTILES, Unit

if TYPE_CHECKING:
    from zerofit.data.lengths.report import LengthReport

_BINS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingBar:
    """What an epoch computes one way, as shares of fixed padding's tokens."""

    label: str
    real: float
    padding: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPlot:
    """All that is drawn."""

    title: str
    unit: str
    bins: tuple[Bin, ...]
    marks: tuple[tuple[str, int], ...]
    """Lines at a length, the shortest first."""
    max_length: int | None
    """The recommended one, or the user's; None where there is none."""
    bars: tuple[PaddingBar, ...]
    bars_title: str


def data_plot(report: LengthReport) -> LengthPlot:
    """Return what is drawn of a report."""
    measured, histogram = report.measured, report.measured.histogram
    most = max(row.cost.tokens for row in report.padding) or 1.0
    length = report.choice.max_length
    samples = "sample" if histogram.num_samples == 1 else "samples"
    return LengthPlot(
        title=f"{measured.subject}: {histogram.num_samples:,} {samples}, {histogram.num_tokens:,} "
        f"{measured.unit.value}\n{measured.counted}",
        unit=measured.unit.value,
        bins=bins(histogram, most=_BINS),
        marks=tuple((f"p{share}", histogram.percentile(share)) for share in PERCENTILES),
        max_length=length if measured.unit is Unit.TOKENS else None,
        bars=tuple(
            PaddingBar(
                label=row.way.value,
                real=row.cost.tokens * (1 - row.waste) / most,
                padding=row.cost.tokens * row.waste / most,
            )
            for row in report.padding
        ),
        bars_title=f"an epoch in batches of {report.workload.batch_size}, max_length {length:,}",
    )
