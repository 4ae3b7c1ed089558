"""The caching allocator: sequences worked out by hand from the rules, and laws over random ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerofit.core.units import KIB, MIB
from zerofit.planning.estimate.device_memory.allocator import Block, CachingAllocator, OutOfMemoryError

_Step = tuple[str, int]  # ("+", bytes), or ("-", number of the request that it undoes)


def _run(allocator: CachingAllocator, steps: Sequence[_Step]) -> list[tuple[int, int]]:
    """Return (allocated, reserved) after each step."""
    blocks: list[Block] = []
    sums = []
    for what, number in steps:
        if what == "+":
            blocks.append(allocator.allocate(number))
        else:
            allocator.free(blocks[number])
        sums.append((allocator.allocated_bytes, allocator.reserved_bytes))
    return sums


def _bytes(said: str) -> int:
    """Read "10-1B": pieces in MiB, or in bytes with a B."""
    return sum(int(number) * (1 if unit else MIB) for number, unit in re.findall(r"([+-]?\d+)(B?)", said))


def _check(allocator: CachingAllocator, steps: str, sums: str) -> None:
    """Check that "+40 -0", a birth and its death, has allocated/reserved "40/40 0/40" after each."""
    said = [(one[0], _bytes(one[1:]) if one[0] == "+" else int(one[1:])) for one in steps.split()]
    expected = [tuple(map(_bytes, one.split("/"))) for one in sums.split()]
    assert _run(allocator, said) == expected


_FIXED = {
    "nothing takes nothing": ("+0", "0/0"),
    "sizes are rounded up to 512 bytes": ("+1B", "512B/2"),
    "and again": ("+513B", "1024B/2"),
    "1 MiB is small, two of them fill a small segment": ("+1 +1 +1B", "1/2 2/2 2+512B/4"),
    "a middling request takes 20 MiB, whose rest the next one gets": ("+1+1B +17", "1+512B/20 18+512B/20"),
    "rounding comes first: a byte less than 10 MiB is 10 MiB": ("+10-1B +10", "10/10 20/20"),
    "a rest of up to 1 MiB stays": ("+11+1B", "12/12"),
    "a rest of 1 MiB is not split off": ("+21", "22/22"),
    "a block far too large is split": ("+22 -0 +20", "22/22 0/22 20/22"),
    "best fit: the 30 MiB block is taken, so that 40 MiB still fit": (
        "+40 +30 -0 -1 +25 +40",
        "40/40 70/70 30/70 0/70 25/70 65/70",
    ),
    "neighbours merge once both are free": (
        "+12 -0 +5 +7 -1 -2 +12",
        "12/12 0/12 5/12 12/12 7/12 0/12 12/12",
    ),
    "segments never merge": ("+10 +10 -0 -1 +20", "10/10 20/20 10/20 0/20 20/40"),
    "the small pool takes nothing from the large one": ("+20 -0 +512B", "20/20 0/20 512B/22"),
}
_EXPANDABLE = {
    "small pages are 2 MiB": ("+1B", "512B/2"),
    "large pages are 20 MiB": ("+3", "3/20"),
    "any rest is split off": ("+21 +19", "21/40 40/40"),
    "the free end of the segment is grown": ("+10 +15", "10/20 25/40"),
    "there is one segment, in which all merges": ("+20 +20 -0 -1 +40", "20/20 40/40 20/40 0/40 40/40"),
    "a hole is used before the segment's end": ("+20 +30 -0 +10", "20/20 50/60 30/60 40/60"),
    "... even a larger one than the free end, which could still grow": (
        "+20 +30 -0 +8 +15",
        "20/20 50/60 30/60 38/60 53/80",
    ),
}


@pytest.mark.parametrize("rule", _FIXED)
def test_requests_and_what_they_reserve(rule: str) -> None:
    _check(CachingAllocator(), *_FIXED[rule])


@pytest.mark.parametrize("rule", _EXPANDABLE)
def test_expandable_segments(rule: str) -> None:
    _check(CachingAllocator(expandable_segments=True), *_EXPANDABLE[rule])


def test_the_cache_goes_back_before_a_request_fails() -> None:
    _check(CachingAllocator(capacity=60 * MIB), "+40 -0 +50", "40/40 0/40 50/50")


def test_a_segment_with_a_block_in_use_does_not_go_back() -> None:
    allocator = CachingAllocator(capacity=60 * MIB)
    _run(allocator, [("+", 40 * MIB), ("-", 0), ("+", 2 * MIB)])
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(50 * MIB)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (2 * MIB, 40 * MIB)


def test_whole_pages_of_an_expandable_segment_go_back_and_are_mapped_again() -> None:
    allocator = CachingAllocator(capacity=80 * MIB, expandable_segments=True)
    # 70 MiB lie in pages 0 to 3; freeing the first 50 MiB leaves pages 0 and 1 empty, and 10 MiB of page 2.
    sums = _run(
        allocator,
        [("+", 50 * MIB), ("+", 20 * MIB), ("-", 0), ("+", 20 * MIB), ("+", 30 * MIB)],
    )
    assert sums[2] == (20 * MIB, 80 * MIB)
    assert sums[4] == (70 * MIB, 80 * MIB)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 80 * MIB


def test_an_expandable_segment_fits_where_fixed_ones_are_in_the_way() -> None:
    steps = [("+", 30 * MIB), ("+", 30 * MIB), ("+", 2 * MIB), ("-", 0), ("-", 1), ("+", 58 * MIB)]
    fixed, expandable = CachingAllocator(), CachingAllocator(expandable_segments=True)
    assert _run(fixed, steps)[-1] == (60 * MIB, 138 * MIB)
    assert _run(expandable, steps)[-1] == (60 * MIB, 80 * MIB)


def test_streams_share_no_blocks() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(20 * MIB))
    allocator.free(allocator.allocate(20 * MIB, stream=1))
    assert allocator.reserved_bytes == 40 * MIB
    allocator.allocate(20 * MIB, stream=1)
    assert allocator.reserved_bytes == 40 * MIB


_SIZES = st.one_of(
    st.integers(0, 4 * KIB), st.integers(KIB, 2 * MIB), st.integers(MIB, 12 * MIB), st.integers(MIB, 70 * MIB)
)
_STEPS = st.lists(st.tuples(st.booleans(), _SIZES, st.integers(0, 1000), st.integers(0, 1)), max_size=60)


@settings(max_examples=150, deadline=None)
@given(steps=_STEPS, is_expandable=st.booleans(), capacity=st.one_of(st.none(), st.integers(0, 300 * MIB)))
def test_laws(steps: list[tuple[bool, int, int, int]], is_expandable: bool, capacity: int | None) -> None:
    allocator = CachingAllocator(capacity=capacity, expandable_segments=is_expandable)
    live: list[tuple[Block, int]] = []
    for is_birth, size, which, stream in steps:
        if is_birth or not live:
            try:
                live.append((allocator.allocate(size, stream), size))
            except OutOfMemoryError:
                assert capacity is not None
        else:
            allocator.free(live.pop(which % len(live))[0])
        ranges = sorted(block[:2] for block, size in live if size)
        assert all(one[1] <= next_[0] for one, next_ in pairwise(ranges))
        assert sum(size for _, size in live) <= allocator.allocated_bytes <= allocator.reserved_bytes
        assert capacity is None or allocator.reserved_bytes <= capacity
    for block, _ in live:
        allocator.free(block)
    assert allocator.allocated_bytes == 0
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
