"""BatchLengths: how long the samples are where each batch is padded to its own longest; draws of batches."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

_GOLDEN = (5**0.5 - 1) / 2
NUM_DRAWN = 40
"""Batches that are drawn: 400 lead to the same reserved memory within 2 % (test_ragged.py)."""
_LONGEST_AT = 8
"""Place of the longest batch among them. A run meets its longest after some others, whose blocks are then too
small for it; were it the first, all others would fit into its blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLengths:
    """The samples that batches are made of."""

    counts: tuple[tuple[int, int], ...]
    """(length, number of samples), at least two lengths."""
    multiple: int = 1
    """Batches are padded to a multiple of this."""
    is_grouped: bool = False
    """True if the samples of a batch are of about one length."""

    def shares(self, longest: int, samples: int, *, drawn: int = NUM_DRAWN) -> tuple[float, ...]:
        """Return the widths of batches as shares of the longest, the same at each call; one is 1.

        Multiples of the golden ratio spread evenly in any order of magnitude, as draws do only in the long
        run. Of the longest of several samples a quantile is that root of one sample's.

        Args:
            longest: tokens at which samples are cut.
            samples: in each batch.
            drawn: number of batches.
        """
        sums = list(accumulate(weight for _, weight in self.counts))
        root = 1 if self.is_grouped else 1 / samples
        parts = ((_GOLDEN * number) % 1.0 for number in range(1, drawn + 1))
        widths = [self.counts[bisect_left(sums, sums[-1] * part**root)][0] for part in parts]
        widths[min(_LONGEST_AT, drawn - 1)] = longest
        return tuple(min(longest, -(-width // self.multiple) * self.multiple) / longest for width in widths)


def drawn_shares(lengths: BatchLengths | None, longest: int | None, samples: int) -> tuple[float, ...]:
    """Return the widths of drawn batches; empty if all are alike, or nothing is known of them."""
    if lengths is None or longest is None:
        return ()
    shares = lengths.shares(longest, samples)
    return shares if min(shares) < 1.0 else ()
