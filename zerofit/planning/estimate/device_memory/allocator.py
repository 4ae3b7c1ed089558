"""CachingAllocator: a model of PyTorch's CUDA caching allocator with its default settings.

It follows c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h at torch 2.13.0; other
releases were not compared:
https://github.com/pytorch/pytorch/blob/v2.13.0/c10/cuda/CUDACachingAllocator.cpp
Left out, as off by default: max_split_size, garbage collection, power-of-two rounding.
ASSUMPTION: each cudaMalloc returns a higher address than the one before; the address breaks ties only.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from zerofit.core.units import MIB

MIN_BLOCK_SIZE = 512
"""Sizes are rounded up to a multiple of these bytes (kMinBlockSize)."""
SMALL_SIZE = 1 * MIB
"""The largest request that the small pool serves (kSmallSize)."""
SMALL_BUFFER = 2 * MIB
"""Segment size of the small pool (kSmallBuffer)."""
LARGE_BUFFER = 20 * MIB
"""Segment size for medium requests (large_segment_size)."""
MIN_LARGE_ALLOC = 10 * MIB
"""The least request that gets a segment of its own (kMinLargeAlloc)."""
ROUND_LARGE = 2 * MIB
"""Such a segment's size is rounded up to a multiple of this (kRoundLarge)."""

Block = tuple[int, int, int]
"""First address, end and pool of a block in use, in units; opaque to callers."""

_SHIFT = 44
_LOW = (1 << _SHIFT) - 1
_REGION = 1 << 36  # units of one pool's expandable segment: 32 TiB
_SMALL_UNITS = SMALL_SIZE // MIN_BLOCK_SIZE


class OutOfMemoryError(Exception):
    """A request does not fit, even after all cached segments were released."""


class _Pool:
    """The free blocks of one size class on one stream, and its expandable segment, if any."""

    __slots__ = ("base", "blocks", "end", "holes", "is_small", "least_rest", "page")

    def __init__(self, number: int, *, is_expandable: bool) -> None:
        self.is_small = number % 2 == 1
        # A block is split if the remainder is more than this.
        self.least_rest = 0 if self.is_small or is_expandable else _SMALL_UNITS
        self.blocks: list[int] = []  # size << 44 | first address, sorted
        self.page = (SMALL_BUFFER if self.is_small else LARGE_BUFFER) // MIN_BLOCK_SIZE
        self.base = self.end = (number + 1) * _REGION
        self.holes: list[tuple[int, int]] = []  # unmapped before the end, sorted


class CachingAllocator:
    """Blocks, the segments that they are split from, and the totals of torch.cuda.memory_stats.

    Internally, sizes and addresses are in units of 512 bytes. Two maps hold both ends of every free block, to
    find its neighbours.
    """

    def __init__(self, *, capacity: int | None = None, expandable_segments: bool = False) -> None:
        """Start empty.

        Args:
            capacity: bytes that the driver can hand out at most; None for no limit.
        """
        self.allocated_bytes = 0
        """In blocks that are in use, as torch.cuda.memory_allocated counts them."""
        self.reserved_bytes = 0
        """Taken from the driver, as torch.cuda.memory_reserved counts them."""
        self.most_reserved_bytes = 0
        """The most that was taken at one time, as torch.cuda.max_memory_reserved counts; callers reset it."""
        self.was_short = False
        """True once the driver had too little, so that cached blocks were given back or memory ran out."""
        self._capacity = capacity
        self._is_expandable = expandable_segments
        # Of stream s: the large pool at 2 s, the small one at 2 s + 1.
        self._pools = [_Pool(number, is_expandable=expandable_segments) for number in (0, 1)]
        self._free_from: dict[int, int] = {}  # first address -> end
        self._free_to: dict[int, int] = {}  # end -> first address
        self._segments: dict[int, int] = {}  # first address -> size, without expandable segments
        self._next_address = 1

    def allocate(self, num_bytes: int, stream: int = 0) -> Block:
        """Serve a request and return its block, for ``free``; a request of 0 bytes takes nothing.

        Raises:
            OutOfMemoryError: it does not fit in the capacity.
        """
        size = -(-num_bytes // MIN_BLOCK_SIZE)
        number = 2 * stream + (size <= _SMALL_UNITS)
        if size == 0:
            return 0, 0, number
        while number >= len(self._pools):
            self._pools.append(_Pool(len(self._pools), is_expandable=self._is_expandable))
        pool = self._pools[number]
        blocks = pool.blocks
        index = bisect_left(blocks, size << _SHIFT)
        if index < len(blocks):
            if self._is_expandable:
                index = self._prefer_inner(pool, index)
            first = blocks.pop(index) & _LOW
            end = self._free_from.pop(first)
            del self._free_to[end]
        else:
            first, end = self._new_block(pool, size)
        rest = end - first - size
        if rest > pool.least_rest:
            cut = first + size
            self._free_from[cut] = end
            self._free_to[end] = cut
            insort(blocks, rest << _SHIFT | cut)
            end = cut
        self.allocated_bytes += (end - first) * MIN_BLOCK_SIZE
        return first, end, number

    def free(self, block: Block) -> None:
        """Free a block and merge it with its free neighbours."""
        first, end, number = block
        if first == end:
            return
        self.allocated_bytes -= (end - first) * MIN_BLOCK_SIZE
        blocks = self._pools[number].blocks
        free_from, free_to = self._free_from, self._free_to
        if first in free_to:
            before = free_to.pop(first)
            del blocks[bisect_left(blocks, first - before << _SHIFT | before)]
            first = before
        if end in free_from:
            after = free_from.pop(end)
            del blocks[bisect_left(blocks, after - end << _SHIFT | end)]
            end = after
        free_from[first] = end
        free_to[end] = first
        insort(blocks, end - first << _SHIFT | first)

    def empty_cache(self) -> None:
        """Release every segment, or page of an expandable one, that holds no block in use."""
        for pool in self._pools:
            for key in list(pool.blocks):
                first = key & _LOW
                if self._is_expandable:
                    self._unmap(pool, first)
                elif self._segments.get(first) == key >> _SHIFT:
                    self._forget(pool, first)
                    self.reserved_bytes -= self._segments.pop(first) * MIN_BLOCK_SIZE

    def _new_block(self, pool: _Pool, size: int) -> tuple[int, int]:
        """Take memory from the driver, after releasing cached segments if it does not suffice."""
        take = self._expand if self._is_expandable else self._take_segment
        block = take(pool, size)
        if block is None:
            self.empty_cache()
            block = take(pool, size)
        if block is None:
            raise OutOfMemoryError
        return block

    def _take_segment(self, pool: _Pool, size: int) -> tuple[int, int] | None:
        if pool.is_small or size < MIN_LARGE_ALLOC // MIN_BLOCK_SIZE:
            taken = pool.page
        else:
            taken = -(-size // (ROUND_LARGE // MIN_BLOCK_SIZE)) * (ROUND_LARGE // MIN_BLOCK_SIZE)
        if not self._reserve(taken):
            return None
        first = self._next_address
        self._next_address += taken + 1  # the gap keeps neighbouring segments from merging
        self._segments[first] = taken
        return first, first + taken

    def _reserve(self, taken: int) -> bool:
        if self._capacity is not None and self.reserved_bytes + taken * MIN_BLOCK_SIZE > self._capacity:
            self.was_short = True
            return False
        self.reserved_bytes += taken * MIN_BLOCK_SIZE
        self.most_reserved_bytes = max(self.most_reserved_bytes, self.reserved_bytes)
        return True

    def _forget(self, pool: _Pool, first: int) -> int:
        """Remove a free block from all lists and return its end."""
        end = self._free_from.pop(first)
        del self._free_to[end]
        del pool.blocks[bisect_left(pool.blocks, end - first << _SHIFT | first)]
        return end

    # Expandable segments: one range of addresses per pool, whose pages are mapped from its beginning on.

    def _prefer_inner(self, pool: _Pool, index: int) -> int:
        """Skip a block that can be expanded if the next one can be expanded less (get_free_block)."""
        unmapped = dict(pool.holes)
        unmapped[pool.end] = pool.end + _LOW

        def room(at: int) -> int:
            end = self._free_from[pool.blocks[at] & _LOW]
            return (pool.blocks[at] >> _SHIFT) + unmapped.get(end, end) - end

        while index + 1 < len(pool.blocks) and room(index + 1) < room(index):
            index += 1
        return index

    def _expand(self, pool: _Pool, size: int) -> tuple[int, int] | None:
        """Map pages at the lowest address where the request fits together with the free block before it."""
        for start in [*(start for start, _ in pool.holes), pool.end]:
            first = self._free_to.get(start, start)
            end, mapped = self._reach(pool, first, size)
            if end - first >= size:
                break
        if not self._reserve(sum(stop - begin for begin, stop in mapped)):
            return None
        inner = [range_ for range_ in mapped if range_[0] < pool.end]
        pool.holes = _without(pool.holes, inner)
        pool.end = max(pool.end, mapped[-1][1])
        at = first
        while at < end:  # free blocks in between become part of the new block
            at = self._forget(pool, at) if at in self._free_from else dict(mapped)[at]
        return first, end

    def _reach(self, pool: _Pool, first: int, size: int) -> tuple[int, list[tuple[int, int]]]:
        """Return the end of the free and newly mapped ranges from an address on, and the mapped ones."""
        holes = dict(pool.holes)
        mapped: list[tuple[int, int]] = []
        end = first
        while end - first < size:
            if end in self._free_from:
                end = self._free_from[end]
                continue
            pages = -(-(size - (end - first)) // pool.page) * pool.page
            if end not in holes and end != pool.end:
                break
            stop = end + pages if end == pool.end else min(end + pages, holes[end])
            mapped.append((end, stop))
            end = stop
        return self._free_from.get(end, end), mapped

    def _unmap(self, pool: _Pool, first: int) -> None:
        """Unmap the pages that lie wholly inside a free block."""
        end = self._free_from[first]
        start = pool.base + -(-(first - pool.base) // pool.page) * pool.page
        stop = pool.base + (end - pool.base) // pool.page * pool.page
        if start >= stop:
            return
        self._forget(pool, first)
        for low, high in ((first, start), (stop, end)):
            if low < high:
                self._free_from[low], self._free_to[high] = high, low
                insort(pool.blocks, high - low << _SHIFT | low)
        self.reserved_bytes -= (stop - start) * MIN_BLOCK_SIZE
        pool.holes = _joined([*pool.holes, (start, stop)])
        if pool.holes[-1][1] == pool.end:
            pool.end = pool.holes.pop()[0]


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges in order, with adjacent ones joined."""
    joined: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if joined and joined[-1][1] == first:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((first, end))
    return joined


def _without(holes: list[tuple[int, int]], mapped: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the holes without the mapped ranges, each of which starts where a hole does."""
    ends = dict(mapped)
    return [(ends.get(first, first), end) for first, end in holes if ends.get(first, first) < end]
