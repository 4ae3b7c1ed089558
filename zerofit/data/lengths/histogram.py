"""LengthHistogram: how many samples have which length, with exact percentiles, in memory that stays small."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthHistogram:
    """The number of samples of each length that occurs."""

    counts: tuple[tuple[int, int], ...]
    """(length in tokens, samples of that length), the shortest first; no length without samples."""

    @classmethod
    def of(cls, counts: Mapping[int, int]) -> Self:
        """Return the histogram of samples by length."""
        return cls(counts=tuple(sorted((length, samples) for length, samples in counts.items() if samples)))

    @classmethod
    def of_lengths(cls, lengths: Iterable[int]) -> Self:
        """Return the histogram of one length a sample."""
        return cls.of(Counter(lengths))

    @property
    def num_samples(self) -> int:
        """All samples."""
        return sum(samples for _, samples in self.counts)

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples together, none of them padding."""
        return sum(length * samples for length, samples in self.counts)

    @property
    def shortest(self) -> int:
        """The least length; 0 without samples."""
        return self.counts[0][0] if self.counts else 0

    @property
    def longest(self) -> int:
        """The greatest length; 0 without samples."""
        return self.counts[-1][0] if self.counts else 0

    def percentile(self, percent: int) -> int:
        """Return the least length that this share of the samples does not exceed; 0 without samples.

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
        """Return how many samples are longer."""
        return sum(samples for own, samples in self.counts if own > length)

    def tokens_above(self, length: int) -> int:
        """Return how many tokens stand behind that place in their samples: what cutting there loses."""
        return sum((own - length) * samples for own, samples in self.counts if own > length)

    def cut_to(self, max_length: int) -> Self:
        """Return the histogram once what is longer has been cut."""
        return self._mapped((min(length, max_length), samples) for length, samples in self.counts)

    def rounded_up(self, multiple: int) -> Self:
        """Return the histogram once each sample is padded to a multiple."""
        return self._mapped((-(-length // multiple) * multiple, samples) for length, samples in self.counts)

    def split_at(self, length: int) -> Self:
        """Return the histogram of the pieces that samples become where longer ones are split, none cut."""
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
    """Neighbouring lengths."""

    least: int
    most: int
    """The greatest length in it, which it includes."""
    num_samples: int
    is_tail: bool = False
    """It is wider than the others, and takes all that is longer."""


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
