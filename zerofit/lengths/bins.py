"""Bins of a histogram, of round widths, for a person to look at."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerofit.lengths.histogram import LengthHistogram


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Neighbouring lengths."""

    least: int
    most: int
    """The greatest length in it, which it includes."""
    num_samples: int
    is_tail: bool = False
    """Whether it is wider than the others, and takes all that is longer."""


def bins(histogram: LengthHistogram, *, most: int) -> tuple[Bin, ...]:
    """Return bins of one width, a power of two, up to p99, and one for the tail behind it.

    Args:
        histogram: of one sample at least.
        most: bins at most.
    """
    first, last = histogram.shortest, histogram.percentile(99)
    width = 1
    while last // width - first // width + 2 > most:
        width *= 2
    starts = [place * width for place in range(first // width, last // width + 1)]
    samples = [0] * len(starts)
    tail = 0
    for length, count in histogram.counts:
        place = bisect_right(starts, length) - 1
        if length < starts[-1] + width:
            samples[place] += count
        else:
            tail += count
    found = [
        Bin(least=start, most=start + width - 1, num_samples=count)
        for start, count in zip(starts, samples, strict=True)
    ]
    if tail:
        found.append(Bin(least=starts[-1] + width, most=histogram.longest, num_samples=tail, is_tail=True))
    return tuple(found)
