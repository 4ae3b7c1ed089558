"""Packing: how many rows of one length hold all samples, each in one row where it fits."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerofit.lengths.histogram import LengthHistogram


def packed_rows(histogram: LengthHistogram, row_length: int) -> int:
    """Return the rows that best-fit decreasing packing needs; longer samples are split into several.

    They are as many as zerofit.data.pack_documents makes of all samples at once: the longest piece left goes
    into the fullest row that still has room for it. Pieces of one length are placed together, so that it
    takes no longer for more samples.
    """
    free: Counter[int] = Counter()  # rows by the room that they have left
    rooms: list[int] = []  # the keys of free, in order
    rows = 0
    for length, samples in reversed(histogram.split_at(row_length).counts):
        left = samples if length else 0  # an empty one takes no room
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
            if left and filled < available:  # the last row takes fewer
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
    """Return the rows that samples need where they may be cut anywhere, as with concatenated texts."""
    return -(-histogram.num_tokens // row_length)
