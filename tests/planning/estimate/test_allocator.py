"""The caching allocator: sequences worked out by hand from the rules, and laws over random ones."""

from __future__ import annotations

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


def _in_mib(steps: str, sums: str) -> tuple[list[_Step], list[tuple[int, int]]]:
    """Read "+40 -0" as steps and "40/40 0/40" as (allocated, reserved) after each, in MiB."""
    said = [(one[0], int(one[1:]) * (MIB if one[0] == "+" else 1)) for one in steps.split()]
    return said, [tuple(int(part) * MIB for part in one.split("/")) for one in sums.split()]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        pytest.param([("+", 0)], [(0, 0)], id="nothing takes nothing"),
        pytest.param([("+", 1)], [(512, 2 * MIB)], id="sizes are rounded up to 512 bytes"),
        pytest.param([("+", 513)], [(1024, 2 * MIB)], id="and again"),
        pytest.param(
            [("+", 1 * MIB), ("+", 1 * MIB), ("+", 1)],
            [(1 * MIB, 2 * MIB), (2 * MIB, 2 * MIB), (2 * MIB + 512, 4 * MIB)],
            id="1 MiB is small, two of them fill a small segment",
        ),
        pytest.param(
            [("+", 1 * MIB + 1), ("+", 17 * MIB)],
            [(1 * MIB + 512, 20 * MIB), (18 * MIB + 512, 20 * MIB)],
            id="a middling request takes 20 MiB, whose rest the next one gets",
        ),
        pytest.param(
            [("+", 10 * MIB - 1), ("+", 10 * MIB)],
            [(10 * MIB, 10 * MIB), (20 * MIB, 20 * MIB)],
            id="rounding comes first: a byte less than 10 MiB is 10 MiB",
        ),
        pytest.param([("+", 11 * MIB + 1)], [(12 * MIB, 12 * MIB)], id="a rest of up to 1 MiB stays"),
        pytest.param(*_in_mib("+21", "22/22"), id="a rest of 1 MiB is not split off"),
        pytest.param(*_in_mib("+22 -0 +20", "22/22 0/22 20/22"), id="a block far too large is split"),
        pytest.param(
            *_in_mib("+40 +30 -0 -1 +25 +40", "40/40 70/70 30/70 0/70 25/70 65/70"),
            id="best fit: the 30 MiB block is taken, so that 40 MiB still fit",
        ),
        pytest.param(
            *_in_mib("+12 -0 +5 +7 -1 -2 +12", "12/12 0/12 5/12 12/12 7/12 0/12 12/12"),
            id="neighbours merge once both are free",
        ),
        pytest.param(
            *_in_mib("+10 +10 -0 -1 +20", "10/10 20/20 10/20 0/20 20/40"), id="segments never merge"
        ),
        pytest.param(
            [("+", 20 * MIB), ("-", 0), ("+", 512)],
            [(20 * MIB, 20 * MIB), (0, 20 * MIB), (512, 22 * MIB)],
            id="the small pool takes nothing from the large one",
        ),
    ],
)
def test_requests_and_what_they_reserve(steps: list[_Step], expected: list[tuple[int, int]]) -> None:
    assert _run(CachingAllocator(), steps) == expected


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        pytest.param([("+", 1)], [(512, 2 * MIB)], id="small pages are 2 MiB"),
        pytest.param(*_in_mib("+3", "3/20"), id="large pages are 20 MiB"),
        pytest.param(*_in_mib("+21 +19", "21/40 40/40"), id="any rest is split off"),
        pytest.param(*_in_mib("+10 +15", "10/20 25/40"), id="the free end of the segment is grown"),
        pytest.param(
            *_in_mib("+20 +20 -0 -1 +40", "20/20 40/40 20/40 0/40 40/40"),
            id="there is one segment, in which all merges",
        ),
        pytest.param(
            *_in_mib("+20 +30 -0 +10", "20/20 50/60 30/60 40/60"),
            id="a hole is used before the segment's end",
        ),
        pytest.param(
            *_in_mib("+20 +30 -0 +8 +15", "20/20 50/60 30/60 38/60 53/80"),
            id="... even a larger one than the free end, which could still grow",
        ),
    ],
)
def test_expandable_segments(steps: list[_Step], expected: list[tuple[int, int]]) -> None:
    assert _run(CachingAllocator(expandable_segments=True), steps) == expected


def test_the_cache_goes_back_before_a_request_fails() -> None:
    allocator = CachingAllocator(capacity=60 * MIB)
    sums = _run(allocator, [("+", 40 * MIB), ("-", 0), ("+", 50 * MIB)])
    assert sums == [(40 * MIB, 40 * MIB), (0, 40 * MIB), (50 * MIB, 50 * MIB)]


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
