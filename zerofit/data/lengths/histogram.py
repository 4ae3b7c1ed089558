"""LengthHistogram: number of samples by length, with exact percentiles, in little memory."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthHistogram:
    """Number of samples of each occurring length."""

    counts: tuple[tuple[int, int], ...]
    """(length in tokens, number of samples), in ascending order of length; only positive numbers."""

    @classmethod
    def of(cls, counts: Mapping[int, int]) -> Self:
        """Return the histogram of a mapping from length to number of samples."""
        return cls(counts=tuple(sorted((length, samples) for length, samples in counts.items() if samples)))

    @classmethod
    def of_lengths(cls, lengths: Iterable[int]) -> Self:
        """Return the histogram of a list of lengths."""
        return cls.of(Counter(lengths))

    @property
    def num_samples(self) -> int:
        """Total number of samples."""
        return sum(samples for _, samples in self.counts)

    @property
    def num_tokens(self) -> int:
        """Total number of tokens, without padding."""
        return sum(length * samples for length, samples in self.counts)

    @property
    def shortest(self) -> int:
        """Minimum length; 0 without samples."""
        return self.counts[0][0] if self.counts else 0

    @property
    def longest(self) -> int:
        """Maximum length; 0 without samples."""
        return self.counts[-1][0] if self.counts else 0

    def percentile(self, percent: int) -> int:
        """Return a percentile of the lengths (nearest rank); 0 without samples.

        Args:
            percent: from 0 to 100.
        """
        wanted, seen = max(1, -(-self.num_samples * percent // 100)), 0
        for length, samples in self.counts:
            seen += samples
            if seen >= wanted:
                return length
        return 0

    def samples_above(self, length: int) -> int:
        """Return the number of samples longer than a length."""
        return sum(samples for own, samples in self.counts if own > length)

    def tokens_above(self, length: int) -> int:
        """Return the number of tokens beyond this length in their samples, which truncation would lose."""
        return sum((own - length) * samples for own, samples in self.counts if own > length)

    def cut_to(self, max_length: int) -> Self:
        """Return the histogram after truncation to a maximum length."""
        return self._mapped((min(length, max_length), samples) for length, samples in self.counts)

    def rounded_up(self, multiple: int) -> Self:
        """Return the histogram after padding each sample to a multiple."""
        return self._mapped((-(-length // multiple) * multiple, samples) for length, samples in self.counts)

    def split_at(self, length: int) -> Self:
        """Return the histogram after splitting samples longer than a length, without loss."""
        pieces = []
        for own, samples in self.counts:
            whole, rest = divmod(own, length)
            pieces += [(length, whole * samples)] if whole else []
            pieces += [(rest, samples)] if rest or not whole else []
        return self._mapped(pieces)

    def _mapped(self, pairs: Iterable[tuple[int, int]]) -> Self:
        counts: Counter[int] = Counter()
        for length, samples in pairs:
            counts[length] += samples
        return self.of(counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """A range of lengths."""

    least: int
    most: int
    """Its maximum length, inclusive."""
    num_samples: int
    is_tail: bool = False
    """True for the last, wider bin of all longer samples."""


def bins(histogram: LengthHistogram, *, most: int) -> tuple[Bin, ...]:
    """Return bins of equal width, a power of two, up to p99, and one for the tail.

    Args:
        histogram: not empty.
        most: maximum number of bins.
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
