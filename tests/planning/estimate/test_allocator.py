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
        pytest.param(
            [("+", 21 * MIB)],
            [(22 * MIB, 22 * MIB)],
            id="large segments are multiples of 2 MiB, and a rest of 1 MiB is not split off",
        ),
        pytest.param(
            [("+", 22 * MIB), ("-", 0), ("+", 20 * MIB)],
            [(22 * MIB, 22 * MIB), (0, 22 * MIB), (20 * MIB, 22 * MIB)],
            id="a cached block of more than 1 MiB too many is split",
        ),
        pytest.param(
            [("+", 40 * MIB), ("+", 30 * MIB), ("-", 0), ("-", 1), ("+", 25 * MIB)],
            [
                (40 * MIB, 40 * MIB),
                (70 * MIB, 70 * MIB),
                (30 * MIB, 70 * MIB),
                (0, 70 * MIB),
                (25 * MIB, 70 * MIB),
            ],
            id="best fit: the 30 MiB block is taken ...",
        ),
        pytest.param(
            [("+", 40 * MIB), ("+", 30 * MIB), ("-", 0), ("-", 1), ("+", 25 * MIB), ("+", 40 * MIB)],
            [
                (40 * MIB, 40 * MIB),
                (70 * MIB, 70 * MIB),
                (30 * MIB, 70 * MIB),
                (0, 70 * MIB),
                (25 * MIB, 70 * MIB),
                (65 * MIB, 70 * MIB),
            ],
            id="... so that 40 MiB still fit",
        ),
        pytest.param(
            [("+", 12 * MIB), ("-", 0), ("+", 5 * MIB), ("+", 7 * MIB), ("-", 1), ("-", 2), ("+", 12 * MIB)],
            [
                (12 * MIB, 12 * MIB),
                (0, 12 * MIB),
                (5 * MIB, 12 * MIB),
                (12 * MIB, 12 * MIB),
                (7 * MIB, 12 * MIB),
                (0, 12 * MIB),
                (12 * MIB, 12 * MIB),
            ],
            id="neighbours merge once both are free",
        ),
        pytest.param(
            [("+", 10 * MIB), ("+", 10 * MIB), ("-", 0), ("-", 1), ("+", 20 * MIB)],
            [
                (10 * MIB, 10 * MIB),
                (20 * MIB, 20 * MIB),
                (10 * MIB, 20 * MIB),
                (0, 20 * MIB),
                (20 * MIB, 40 * MIB),
            ],
            id="segments never merge",
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
        pytest.param([("+", 3 * MIB)], [(3 * MIB, 20 * MIB)], id="large pages are 20 MiB"),
        pytest.param(
            [("+", 21 * MIB), ("+", 19 * MIB)],
            [(21 * MIB, 40 * MIB), (40 * MIB, 40 * MIB)],
            id="any rest is split off",
        ),
        pytest.param(
            [("+", 10 * MIB), ("+", 15 * MIB)],
            [(10 * MIB, 20 * MIB), (25 * MIB, 40 * MIB)],
            id="the free end of the segment is grown",
        ),
        pytest.param(
            [("+", 20 * MIB), ("+", 20 * MIB), ("-", 0), ("-", 1), ("+", 40 * MIB)],
            [
                (20 * MIB, 20 * MIB),
                (40 * MIB, 40 * MIB),
                (20 * MIB, 40 * MIB),
                (0, 40 * MIB),
                (40 * MIB, 40 * MIB),
            ],
            id="there is one segment, in which all merges",
        ),
        pytest.param(
            [("+", 20 * MIB), ("+", 30 * MIB), ("-", 0), ("+", 10 * MIB)],
            [
                (20 * MIB, 20 * MIB),
                (50 * MIB, 60 * MIB),
                (30 * MIB, 60 * MIB),
                (40 * MIB, 60 * MIB),
            ],
            id="a hole is used before the segment's end",
        ),
        pytest.param(
            [("+", 20 * MIB), ("+", 30 * MIB), ("-", 0), ("+", 8 * MIB), ("+", 15 * MIB)],
            [
                (20 * MIB, 20 * MIB),
                (50 * MIB, 60 * MIB),
                (30 * MIB, 60 * MIB),
                (38 * MIB, 60 * MIB),
                (53 * MIB, 80 * MIB),
            ],
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
