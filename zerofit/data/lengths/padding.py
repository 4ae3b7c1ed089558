"""Tokens computed per epoch: padded to a fixed length or to the longest of each batch, or packed."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerofit.data.lengths.histogram import LengthHistogram


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Tokens and attention computed over one epoch."""

    tokens: float
    """Padding included; an expected value if batches are random."""
    attention: float
    """Pairs of tokens in attention: the sum of each sample's padded length squared."""

    def times(self, factor: float) -> Cost:
        """Return the cost multiplied by a factor."""
        return Cost(tokens=self.tokens * factor, attention=self.attention * factor)


def unpadded(histogram: LengthHistogram) -> Cost:
    """Return the cost without padding beyond the histogram's lengths."""
    return Cost(
        tokens=histogram.num_tokens,
        attention=sum(length * length * samples for length, samples in histogram.counts),
    )


def fixed(histogram: LengthHistogram, length: int) -> Cost:
    """Return the cost if every sample is padded or truncated to one length."""
    return Cost(
        tokens=histogram.num_samples * length, attention=float(histogram.num_samples) * length * length
    )


def dynamic(histogram: LengthHistogram, batch_size: int) -> Cost:
    """Return the expected cost if each batch is padded to its longest sample, in random order.

    Exact, without simulation: a batch is a random subset of the samples, so the probability that none of them
    is longer than L is C(samples up to L, batch) / C(all samples, batch).

    Args:
        histogram: lengths as padded, see LengthHistogram.rounded_up.
        batch_size: samples in one forward pass on one rank; the last batch has the remaining ones.
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
    """Return the expected maximum length of `size` random samples, and the expected square of it."""
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
    """Return the probability that a random subset of `size` of all `total` is within `among` of them."""
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


def pack_lengths(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Return the documents of each row by best-fit decreasing: longest first, each into the fullest row.

    It needs at most 11/9 of the optimal number of rows, plus four (Johnson, 1973); for token sequences see
    https://arxiv.org/abs/2107.02027 and https://arxiv.org/abs/2404.10830.

    Args:
        lengths: tokens of each document, none above row_length.
        row_length: tokens per row.
    """
    rows: list[list[int]] = []
    spaces: list[int] = []
    rows_with: dict[int, list[int]] = {}
    for document in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect_left(spaces, lengths[document])
        if place == len(spaces):
            row, space = len(rows), row_length
            rows.append([])
        else:
            space = spaces[place]
            row = rows_with[space].pop()
            if not rows_with[space]:
                del spaces[place], rows_with[space]
        rows[row].append(document)
        left = space - lengths[document]
        if left and left not in rows_with:
            insort(spaces, left)
        if left:
            rows_with.setdefault(left, []).append(row)
    return rows


def packed_rows(histogram: LengthHistogram, row_length: int) -> int:
    """Return the rows that best-fit decreasing packing needs; longer samples are split into several.

    The result equals pack_lengths for all pieces at once: the longest remaining piece goes into the fullest
    row with enough room. Pieces of equal length are placed together, so that the time does
    not depend on the number of samples.
    """
    free: Counter[int] = Counter()  # rows by their free room
    rooms: list[int] = []  # the keys of free, sorted
    rows = 0
    for length, samples in reversed(histogram.split_at(row_length).counts):
        left = samples if length else 0  # empty pieces take no room
        while left:
            place = bisect_left(rooms, length)
            if place < len(rooms):
                room = rooms[place]
                available = free[room]
            else:
                room, available = row_length, -(-left // (row_length // length))
                rows += available
                free[room] += available
                insort(rooms, room)
            each = room // length
            filled = min(available, left // each)
            moved = Counter({room - each * length: filled})
            left -= filled * each
            used = filled
            if left and filled < available:  # the last row gets fewer
                moved[room - left * length] += 1
                left, used = 0, used + 1
            free[room] -= used
            if not free[room]:
                del free[room]
                rooms.remove(room)
            for rest, count in moved.items():
                if rest and count:
                    if rest not in free:
                        insort(rooms, rest)
                    free[rest] += count
    return rows


def least_rows(histogram: LengthHistogram, row_length: int) -> int:
    """Return the rows needed if samples may be split anywhere, as with concatenated texts."""
    return -(-histogram.num_tokens // row_length)
