"""Buckets of a dataset of which only the lengths are known: an epoch of bucketing.py, played through."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.lengths import LengthHistogram
from zerofit.lengths.report import Buckets

if TYPE_CHECKING:
    from typing import Any

_MOST = 2**19
"""Samples that are played through. ASSUMPTION: half a million give three digits in half a second."""
_PARTS = 4
"""Parts of what is played through that are sorted for themselves, at least; as bucketing.py has it."""


def simulated_buckets(histogram: LengthHistogram, batch_size: int, *, seed: int = 0) -> Buckets:
    """Return one epoch of length bucketing on one rank.

    Args:
        histogram: of one sample at least.
        batch_size: samples of one forward pass on one rank.
        seed: of the order.
    """
    import numpy

    from zerofit.data.bucketing import MOST_ROUNDS_TOGETHER, as_lengths, epoch_of, rounds_of_samples

    pool = batch_size * MOST_ROUNDS_TOGETHER
    most = pool * max(_PARTS, _MOST // pool)
    lengths = as_lengths(_drawn(histogram, min(histogram.num_samples, most), seed))
    rounds = rounds_of_samples(len(lengths), batch_size=batch_size, num_ranks=1)
    epoch = epoch_of(lengths, rounds, seed=seed, epoch=0)
    longest = numpy.maximum.reduceat(lengths[epoch.order], epoch.starts[:-1])
    padded, batches = numpy.unique(numpy.repeat(longest, numpy.diff(epoch.starts)), return_counts=True)
    counts = dict(zip(padded.tolist(), batches.tolist(), strict=True))
    return Buckets(padded=LengthHistogram.of(counts), seed=seed)


def _drawn(histogram: LengthHistogram, size: int, seed: int) -> Any:
    """Return so many lengths, one from each of as many equal parts of the sorted samples: all, if so many."""
    import numpy

    lengths, samples = (numpy.asarray(column) for column in zip(*histogram.counts, strict=True))
    if size == histogram.num_samples:
        return numpy.repeat(lengths, samples)
    within = numpy.random.default_rng(seed).random(size)
    places = (numpy.arange(size) + within) * (histogram.num_samples / size)
    return lengths[numpy.searchsorted(numpy.cumsum(samples), places, side="right").clip(max=len(lengths) - 1)]
