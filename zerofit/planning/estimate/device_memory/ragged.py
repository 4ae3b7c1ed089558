"""What PyTorch's allocator reserves for batches of many lengths: steps replayed as they are played."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.core.estimates import Holder, MemoryEstimate, PhaseMemory, RunPhase, Term
from zerofit.core.strategy import Engine
from zerofit.planning.estimate.device_memory.allocator import CachingAllocator, OutOfMemoryError
from zerofit.planning.estimate.device_memory.memory import play_steps, setup_on
from zerofit.planning.estimate.engines.engine import MAX_PLAYED_MICRO_BATCHES

if TYPE_CHECKING:
    from zerofit.core.facts import GpuSpec
    from zerofit.planning.estimate.device_memory.allocator import Block
    from zerofit.planning.estimate.device_memory.replay import Tape
    from zerofit.planning.estimate.engines.engine import Setup

RAGGED = "cache of ragged batches"
"""The term of what is reserved beyond a run whose batches all have the longest's width."""
RAGGED_MORE = 0.2
"""What batches of many lengths add to the uncertainty of the memory that a GPU shows. Of published runs over
such batches it was predicted up to 22 % too low; why is not known (docs/reference/predictions.md)."""
_WHY_MORE = (
    "as the order of the batches decides which blocks the allocator keeps; torch gives them back before it "
    "runs out of memory"
)
_STEADY = 8
"""ASSUMPTION: so many batches behind the last that reserved more, and behind the longest, none will."""
_OF_STEPS = (RunPhase.FORWARD, RunPhase.BACKWARD, RunPhase.STEP, RunPhase.SAVE)
_FORMULA = "reserved by batches drawn from the script's lengths - reserved by batches of the longest"
_SOURCE = "zerofit.planning.estimate.device_memory.ragged"


def with_ragged_batches(
    device: MemoryEstimate, setup: Setup, *, gpu: GpuSpec, limit_bytes: int | None = None
) -> MemoryEstimate:
    """Return an estimate with what the allocator keeps for batches of other widths.

    Args:
        device: the estimate for batches that all have the longest's width.
        setup: with the batches' shares.
        limit_bytes: what the GPU has; None for no limit.
    """
    here, outside = setup_on(setup, gpu)
    capacity = None
    if limit_bytes is not None:
        capacity = max(0, limit_bytes - sum(term.num_bytes for term in outside))
    reserved = reserved_by_phase(here, capacity=capacity)
    return MemoryEstimate(
        phases=tuple(_with_cache(phase, reserved.get(phase.phase, 0)) for phase in device.phases),
        uncertainty=device.uncertainty + RAGGED_MORE,
        uncertainty_source=f"{device.uncertainty_source}; {RAGGED_MORE:.0%} more, {_WHY_MORE}",
    )


def upper_need(device: MemoryEstimate) -> float:
    """Return the upper end of what a GPU must have: without what torch gives back before it runs out."""
    ragged = {
        phase.phase: term.num_bytes for phase in device.phases for term in phase.terms if term.name == RAGGED
    }
    if not ragged:
        return device.upper_bytes
    most = max(phase.total_bytes - ragged.get(phase.phase, 0) for phase in device.phases)
    return most * (1 + device.uncertainty - RAGGED_MORE)


def reserved_by_phase(setup: Setup, *, capacity: int | None = None) -> dict[RunPhase, int]:
    """Return the most bytes reserved in each phase of a run over the batches of a setup.

    It ends once memory is steady, or runs out. At the limit cached blocks are given back before.
    """
    engine, steps = play_steps(setup)
    replay = _RunningReplay(
        engine.tape, CachingAllocator(capacity=capacity, expandable_segments=setup.expandable_segments)
    )
    shares, each = setup.shares, _batches_per_step(setup)
    longest_at, grown_at, most = shares.index(max(shares)), 0, 0
    for step, _ in enumerate(steps, 1):
        if not replay.go_on():
            break
        batches = step * each
        if replay.reserved_bytes > most:
            most, grown_at = replay.reserved_bytes, batches
        if batches >= max(grown_at, longest_at + 1) + _STEADY:
            break
    else:
        replay.go_on()  # the save
    replay.most.setdefault(RunPhase.SAVE, replay.reserved_bytes)
    return replay.most


def _batches_per_step(setup: Setup) -> int:
    if setup.strategy.engine is Engine.FSDP2:  # its log has the micro-batches of a step, all of one width
        return 1
    return min(setup.num_micro_batches if setup.trains else 1, MAX_PLAYED_MICRO_BATCHES)


class _RunningReplay:
    """Replays a tape that is still written, and keeps the most that each phase reserves."""

    def __init__(self, tape: Tape, allocator: CachingAllocator) -> None:
        self.most: dict[RunPhase, int] = {}
        self._tape, self._allocator = tape, allocator
        self._blocks: list[Block] = []
        self._done = self._num_marks = self._num_emptied = 0
        self._phase = RunPhase.LOAD

    @property
    def reserved_bytes(self) -> int:
        """Of the allocator, now."""
        return self._allocator.reserved_bytes

    def go_on(self) -> bool:
        """Replay what is new on the tape; return False once the run is out of memory."""
        tape = self._tape
        marks, emptied = tape.marks[self._num_marks :], tape.emptied[self._num_emptied :]
        self._num_marks, self._num_emptied = len(tape.marks), len(tape.emptied)
        cuts = sorted({place for place, _ in marks} | set(emptied))
        begun = dict(marks)  # of phases that begin at one place the last
        try:
            for cut in cuts:
                self._replay_to(cut)
                if cut in emptied:
                    self._allocator.empty_cache()
                self._phase = begun.get(cut, self._phase)
                self._note()
            self._replay_to(len(tape.entries))
        except OutOfMemoryError:
            return False
        finally:
            self._note()
        return True

    def _replay_to(self, stop: int) -> None:
        """Replay entries up to one."""
        tape, blocks = self._tape, self._blocks
        allocate, free = self._allocator.allocate, self._allocator.free
        sizes, streams = tape.sizes, tape.streams
        for entry in tape.entries[self._done : stop]:
            if entry < 0:
                free(blocks[-entry - 1])
            else:
                blocks.append(allocate(sizes[entry - 1], streams.get(entry - 1, 0) if streams else 0))
        self._done = max(stop, self._done)
        self._note()

    def _note(self) -> None:
        allocator, most = self._allocator, self.most.get(self._phase, 0)
        self.most[self._phase] = max(most, allocator.most_reserved_bytes)
        allocator.most_reserved_bytes = allocator.reserved_bytes


def _with_cache(phase: PhaseMemory, reserved: int) -> PhaseMemory:
    """Return a phase of a step with what is reserved beyond its own cache."""
    if phase.phase not in _OF_STEPS:
        return phase
    more = max(0, reserved - phase.held_by(Holder.TENSORS, Holder.CACHE))
    term = Term(name=RAGGED, num_bytes=more, holder=Holder.CACHE, formula=_FORMULA, source=_SOURCE)
    return replace(phase, terms=(*phase.terms, term))
