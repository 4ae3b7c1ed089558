"""Tape: all that one GPU allocates and frees over a run; replay: the largest moment of each phase of it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from zerofit.core.estimates import RunPhase
from zerofit.planning.estimate.device_memory.allocator import CachingAllocator, OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Iterable


class Tape:
    """The growing list of a run's allocations, which engines write and the allocator replays.

    Blocks are numbered by birth. ``sizes[block]`` and ``terms[block]`` say what each is; ``entries`` holds
    block + 1 for a birth and -(block + 1) for a death; ``marks`` holds (entry index, phase) where a phase
    begins, ``emptied`` the entry indices before which the allocator's cache is given back, and ``streams``
    the CUDA stream of each block that is not on the default one: what a stream has cached serves no other.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.terms: list[str] = []
        self.entries: list[int] = []
        self.marks: list[tuple[int, RunPhase]] = []
        self.emptied: list[int] = []
        self.streams: dict[int, int] = {}

    def allocate(self, num_bytes: int, term: str, *, stream: int = 0) -> int:
        """Note a block's birth and return its number.

        Args:
            num_bytes: its size as asked for, before the allocator rounds it.
            term: the name of the Term that it belongs to.
            stream: the CUDA stream that runs where it is asked for; 0 is the default one.
        """
        block = len(self.sizes)
        self.sizes.append(num_bytes)
        self.terms.append(term)
        self.entries.append(block + 1)
        if stream:
            self.streams[block] = stream
        return block

    def free(self, block: int) -> None:
        """Note a block's death."""
        self.entries.append(-(block + 1))

    def begin(self, phase: RunPhase) -> None:
        """Note that a phase begins; it may come more than once."""
        self.marks.append((len(self.entries), phase))

    def empty_cache(self) -> None:
        """Note that torch.cuda.empty_cache is called: what is reserved and holds no block goes back."""
        self.emptied.append(len(self.entries))


@dataclass(frozen=True, slots=True, kw_only=True)
class TapePeak:
    """One phase at its largest moment: where most is reserved, and of those moments where most is live."""

    phase: RunPhase
    live: tuple[tuple[str, int], ...]
    """(term, bytes as asked for) of the tensors that are alive then, the largest first."""
    allocated_bytes: int
    """Of their blocks: sizes rounded up, and a rest that is too small to be split off."""
    reserved_bytes: int

    @property
    def live_bytes(self) -> int:
        """All live tensors together, as asked for."""
        return sum(num_bytes for _, num_bytes in self.live)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The peaks of a run that was played."""

    peaks: tuple[TapePeak, ...]
    """One a phase, in the order of RunPhase; none of a phase that does not occur or is not reached."""
    ends: bool = True
    """True if the run comes to its end; else it stops with CUDA out of memory in the last of these phases."""


def replay(tape: Tape, *, capacity: int | None = None, expandable_segments: bool = False) -> Replay:
    """Play a tape through the allocator."""
    allocator = CachingAllocator(capacity=capacity, expandable_segments=expandable_segments)
    allocate, free = allocator.allocate, allocator.free
    sizes, streams = tape.sizes, tape.streams
    blocks = [(0, 0, 0)] * len(sizes)
    emptied = set(tape.emptied)
    moments: dict[RunPhase, tuple[int, int, int]] = {}
    ends = True
    for phase, start, stop in _spans(tape, cuts=emptied):
        if start in emptied:
            allocator.empty_cache()
        most = allocator.reserved_bytes
        largest, moment = allocator.allocated_bytes, start
        try:
            for index, entry in enumerate(tape.entries[start:stop], start + 1):
                if entry < 0:
                    free(blocks[-entry - 1])
                    continue
                block = entry - 1
                blocks[block] = allocate(sizes[block], streams.get(block, 0) if streams else 0)
                if allocator.reserved_bytes != most:
                    if allocator.reserved_bytes < most:
                        continue
                    most, largest, moment = allocator.reserved_bytes, allocator.allocated_bytes, index
                elif allocator.allocated_bytes > largest:
                    largest, moment = allocator.allocated_bytes, index
        except OutOfMemoryError:
            ends = False
        moments[phase] = max(moments.get(phase, (-1, -1, 0)), (most, largest, moment))
        if not ends:
            break
    live = _live_at(tape, {moment for _, _, moment in moments.values()})
    peaks = tuple(
        TapePeak(
            phase=phase,
            live=live[moments[phase][2]],
            allocated_bytes=moments[phase][1],
            reserved_bytes=moments[phase][0],
        )
        for phase in RunPhase
        if phase in moments
    )
    return Replay(peaks=peaks, ends=ends)


def replay_live(tape: Tape) -> Replay:
    """Return each phase's largest moment by live tensors alone: as if nothing were rounded or cached."""
    live = _live(tape)
    moments: dict[RunPhase, int] = {}
    for phase, start, stop in _spans(tape):
        moment = max(range(start, stop + 1), key=live.__getitem__)
        if phase not in moments or live[moment] > live[moments[phase]]:
            moments[phase] = moment
    terms = _live_at(tape, set(moments.values()))
    peaks = tuple(
        TapePeak(
            phase=phase,
            live=terms[moments[phase]],
            allocated_bytes=live[moments[phase]],
            reserved_bytes=live[moments[phase]],
        )
        for phase in RunPhase
        if phase in moments
    )
    return Replay(peaks=peaks)


def _live(tape: Tape) -> list[int]:
    """Return the live bytes before the first entry and after each."""
    sizes = tape.sizes
    changes = [sizes[entry - 1] if entry > 0 else -sizes[-entry - 1] for entry in tape.entries]
    return list(accumulate(changes, initial=0))


def _spans(tape: Tape, *, cuts: Iterable[int] = ()) -> list[tuple[RunPhase, int, int]]:
    """Return each phase's stretches of entries, (phase, first, one past the last), in two at each cut."""
    ends = [start for start, _ in tape.marks[1:]] + [len(tape.entries)]
    spans = []
    for (start, phase), end in zip(tape.marks, ends, strict=True):
        places = [start, *sorted(cut for cut in cuts if start < cut < end), end]
        spans += [(phase, first, last) for first, last in pairwise(places)]
    return spans


def _live_at(tape: Tape, moments: set[int]) -> dict[int, tuple[tuple[str, int], ...]]:
    """Return the live bytes by term after so many entries, for each of these moments."""
    sizes, terms = tape.sizes, tape.terms
    found = {}
    alive: set[int] = set()
    done = 0
    for moment in sorted(moments):
        told = set(tape.entries[done:moment])
        alive = {entry for entry in alive | told if entry > 0 and -entry not in told}
        done = moment
        totals: dict[str, int] = {}
        for entry in sorted(alive):
            term = terms[entry - 1]
            totals[term] = totals.get(term, 0) + sizes[entry - 1]
        largest_first = sorted(totals.items(), key=lambda item: -item[1])
        found[moment] = tuple((term, size) for term, size in largest_first if size)
    return found
