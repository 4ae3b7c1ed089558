"""Tape: all allocations and frees of one GPU in a run; replay: the peak of each of its phases."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from zerofit.core.estimates import RunPhase
from zerofit.planning.estimate.device_memory.allocator import CachingAllocator, OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


class Tape:
    """The allocations of a run, which engines write and the allocator replays.

    Blocks are numbered in the order of their allocation. ``sizes[block]`` and ``terms[block]`` describe each;
    ``entries`` holds block + 1 for an allocation and -(block + 1) for a free; ``marks`` holds (entry index,
    phase) where a phase begins, ``emptied`` the entry indices before which the allocator's cache is emptied,
    and ``streams`` the CUDA stream of each block that is not on the default one: streams share no cache.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.terms: list[str] = []
        self.entries: list[int] = []
        self.marks: list[tuple[int, RunPhase]] = []
        self.emptied: list[int] = []
        self.streams: dict[int, int] = {}

    def allocate(self, num_bytes: int, term: str, *, stream: int = 0) -> int:
        """Record an allocation and return the block's number.

        Args:
            num_bytes: as requested, before the allocator rounds it.
            term: name of the Term that it counts for.
            stream: the current CUDA stream; 0 is the default one.
        """
        block = len(self.sizes)
        self.sizes.append(num_bytes)
        self.terms.append(term)
        self.entries.append(block + 1)
        if stream:
            self.streams[block] = stream
        return block

    def free(self, block: int) -> None:
        """Record that a block is freed."""
        self.entries.append(-(block + 1))

    def write_events(
        self,
        events: Iterable[tuple[int, int]],
        blocks: dict[int, int],
        *,
        sizes: Sequence[int],
        terms: Sequence[str],
        hooks: Mapping[int, Callable[[int], None]],
        streams: Sequence[int] = (),
    ) -> None:
        """Record the events of an AllocationLog.

        Args:
            events: (code, argument).
            blocks: the block of each storage that lives; allocations add to it, frees take from it.
            sizes: bytes of each storage.
            terms: of each storage.
            hooks: what is called with the argument of another event, by its code; some may have none.
            streams: of each storage; empty if all are on the default one.
        """
        # allocate() and free(), written out: this loop is where the time goes.
        note_size, note_term, note_entry = self.sizes.append, self.terms.append, self.entries.append
        born = len(self.sizes)
        for code, argument in events:
            if code == 0:  # Event.ALLOCATE
                if streams and streams[argument]:
                    self.streams[born] = streams[argument]
                blocks[argument] = born
                born += 1
                note_size(sizes[argument])
                note_term(terms[argument])
                note_entry(born)
            elif code == 1:  # Event.FREE
                note_entry(-blocks.pop(argument) - 1)
            elif code in hooks:
                hooks[code](argument)
                born = len(self.sizes)

    def begin(self, phase: RunPhase) -> None:
        """Record that a phase begins; it may do so more than once."""
        self.marks.append((len(self.entries), phase))

    def empty_cache(self) -> None:
        """Record a call of torch.cuda.empty_cache."""
        self.emptied.append(len(self.entries))


@dataclass(frozen=True, slots=True, kw_only=True)
class TapePeak:
    """One phase at its peak: the moment with most reserved, and of those with most allocated memory.

    Where a limit is reached it is what the phase reserves at most, and its moment with most allocated: the
    allocator gives cached blocks back, so that most is reserved where little may be live.
    """

    phase: RunPhase
    live: tuple[tuple[str, int], ...]
    """(term, requested bytes) of the live tensors, the largest first."""
    allocated_bytes: int
    """Of their blocks: sizes rounded up, with remainders too small to be split off."""
    reserved_bytes: int

    @property
    def live_bytes(self) -> int:
        """Requested bytes of all live tensors."""
        return sum(num_bytes for _, num_bytes in self.live)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The peaks of a run."""

    peaks: tuple[TapePeak, ...]
    """One per phase that is reached, in the order of RunPhase."""
    ends: bool = True
    """False if the run stops with CUDA out of memory, in the last of these phases."""


def replay(tape: Tape, *, capacity: int | None = None, expandable_segments: bool = False) -> Replay:
    """Play a tape through the allocator."""
    allocator = CachingAllocator(capacity=capacity, expandable_segments=expandable_segments)
    allocate, free = allocator.allocate, allocator.free
    sizes, streams = tape.sizes, tape.streams
    blocks = [(0, 0, 0)] * len(sizes)
    emptied = set(tape.emptied)
    moments: dict[RunPhase, tuple[int, int, int]] = {}
    fullest: dict[RunPhase, tuple[int, int]] = {}
    ends = True
    for phase, start, stop in _spans(tape, cuts=emptied):
        if start in emptied:
            allocator.empty_cache()
        most = allocator.reserved_bytes
        largest, moment = allocator.allocated_bytes, start
        full, full_moment = largest, moment
        try:
            for index, entry in enumerate(tape.entries[start:stop], start + 1):
                if entry < 0:
                    free(blocks[-entry - 1])
                    continue
                block = entry - 1
                blocks[block] = allocate(sizes[block], streams.get(block, 0) if streams else 0)
                if allocator.allocated_bytes > full:
                    full, full_moment = allocator.allocated_bytes, index
                if allocator.reserved_bytes != most:
                    if allocator.reserved_bytes < most:
                        continue
                    most, largest, moment = allocator.reserved_bytes, allocator.allocated_bytes, index
                elif allocator.allocated_bytes > largest:
                    largest, moment = allocator.allocated_bytes, index
        except OutOfMemoryError:
            ends = False
        moments[phase] = max(moments.get(phase, (-1, -1, 0)), (most, largest, moment))
        fullest[phase] = max(fullest.get(phase, (-1, 0)), (full, full_moment))
        if not ends:
            break
    if allocator.was_short:
        moments = {phase: (most, *fullest[phase]) for phase, (most, _, _) in moments.items()}
    return Replay(peaks=_peaks(tape, moments), ends=ends)


def replay_live(tape: Tape) -> Replay:
    """Return each phase's peak of live tensors alone, as if nothing were rounded or cached."""
    live = _live(tape)
    moments: dict[RunPhase, tuple[int, int, int]] = {}
    for phase, start, stop in _spans(tape):
        moment = max(range(start, stop + 1), key=live.__getitem__)
        if phase not in moments or live[moment] > moments[phase][0]:
            moments[phase] = live[moment], live[moment], moment
    return Replay(peaks=_peaks(tape, moments))


def most_live(tape: Tape) -> int:
    """Return the largest sum of live bytes."""
    return max(_live(tape))


def _peaks(tape: Tape, moments: dict[RunPhase, tuple[int, int, int]]) -> tuple[TapePeak, ...]:
    """Return the peaks at (reserved bytes, allocated bytes, number of entries) of each phase."""
    live = _live_at(tape, {moment for _, _, moment in moments.values()})
    return tuple(
        TapePeak(phase=phase, live=live[moment], allocated_bytes=allocated, reserved_bytes=reserved)
        for phase in RunPhase
        if phase in moments
        for reserved, allocated, moment in (moments[phase],)
    )


def _live(tape: Tape) -> list[int]:
    """Return the live bytes before the first entry and after each."""
    sizes = tape.sizes
    changes = [sizes[entry - 1] if entry > 0 else -sizes[-entry - 1] for entry in tape.entries]
    return list(accumulate(changes, initial=0))


def _spans(tape: Tape, *, cuts: Iterable[int] = ()) -> list[tuple[RunPhase, int, int]]:
    """Return each phase's spans of entries, (phase, first, one past the last), split at each cut."""
    ends = [start for start, _ in tape.marks[1:]] + [len(tape.entries)]
    spans = []
    for (start, phase), end in zip(tape.marks, ends, strict=True):
        places = [start, *sorted(cut for cut in cuts if start < cut < end), end]
        spans += [(phase, first, last) for first, last in pairwise(places)]
    return spans


def _live_at(tape: Tape, moments: set[int]) -> dict[int, tuple[tuple[str, int], ...]]:
    """Return the live bytes by term after each of these numbers of entries."""
    sizes, terms = tape.sizes, tape.terms
    found = {}
    alive: set[int] = set()
    done = 0
    for moment in sorted(moments):
        since = set(tape.entries[done:moment])
        alive = {entry for entry in alive | since if entry > 0 and -entry not in since}
        done = moment
        totals: dict[str, int] = {}
        for entry in sorted(alive):
            term = terms[entry - 1]
            totals[term] = totals.get(term, 0) + sizes[entry - 1]
        largest_first = sorted(totals.items(), key=lambda item: -item[1])
        found[moment] = tuple((term, size) for term, size in largest_first if size)
    return found
