"""Tokens that an epoch computes where samples are padded to one length, or to the longest of their batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerofit.lengths.histogram import LengthHistogram


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a model computes over one epoch."""

    tokens: float
    """Padding included; an expected value where batches are drawn at random."""
    attention: float
    """Pairs of tokens that attention looks at: the sum of each sample's padded length squared."""

    def times(self, factor: float) -> Cost:
        """Return the cost of so many times the samples."""
        return Cost(tokens=self.tokens * factor, attention=self.attention * factor)


def unpadded(histogram: LengthHistogram) -> Cost:
    """Return the cost of samples as long as they are; a histogram of padded ones has their padding in it."""
    return Cost(
        tokens=histogram.num_tokens,
        attention=sum(length * length * samples for length, samples in histogram.counts),
    )


def fixed(histogram: LengthHistogram, length: int) -> Cost:
    """Return the cost where every sample is padded, or cut, to one length."""
    return Cost(
        tokens=histogram.num_samples * length, attention=float(histogram.num_samples) * length * length
    )


def dynamic(histogram: LengthHistogram, batch_size: int) -> Cost:
    """Return the expected cost where each batch is padded to its longest sample and the order is random.

    It is exact, without a simulation: a batch is a random subset of the samples, so that the chance that
    none of them is longer than L is C(samples up to L, batch) / C(all samples, batch).

    Args:
        histogram: lengths as padded, see LengthHistogram.rounded_up.
        batch_size: samples of one forward pass on one rank; the last batch takes what is left.
    """
    whole, left = divmod(histogram.num_samples, batch_size)
    tokens = attention = 0.0
    for size, batches in ((batch_size, whole), (left, 1)):
        if size and batches:
            first, second = _moments_of_the_longest(histogram, size)
            tokens += batches * size * first
            attention += batches * size * second
    return Cost(tokens=tokens, attention=attention)


def _moments_of_the_longest(histogram: LengthHistogram, size: int) -> tuple[float, float]:
    """Return the expected length of the longest of so many samples, and that of its square."""
    all_samples = histogram.num_samples
    up_to, before, first, second = 0, 0.0, 0.0, 0.0
    for length, samples in histogram.counts:
        up_to += samples
        chance = _chance_of_all(up_to, all_samples, size)
        first += length * (chance - before)
        second += length * length * (chance - before)
        before = chance
    return first, second


def _chance_of_all(among: int, total: int, size: int) -> float:
    """Return the chance that a random subset lies within so many of all."""
    if among == total:
        return 1.0
    if among < size:
        return 0.0
    return math.exp(
        math.lgamma(among + 1)
        - math.lgamma(among - size + 1)
        - math.lgamma(total + 1)
        + math.lgamma(total - size + 1)
    )
