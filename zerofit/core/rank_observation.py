"""RankObservation: a rank's current phase and progress, in a file that survives the rank's death."""

from __future__ import annotations

import enum
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.core.bounded_read import read_bounded
from zerofit.core.estimates import RunPhase
from zerofit.core.own_file import OwnFile

if TYPE_CHECKING:
    from pathlib import Path


class Phase(enum.Enum):
    """A rank's phase. The live file stores its index: append new ones at the end."""

    LOADING = "loading"
    """From the start to the first batch: imports, model, data."""
    PREPARING = "preparing"
    """Inside accelerator.prepare() or deepspeed.initialize()."""
    DATA = "waiting for data"
    """Inside the DataLoader."""
    FORWARD = "forward"
    """From receiving a batch to its backward pass."""
    BACKWARD = "backward"
    OPTIMIZER_STEP = "optimizer step"
    SAVING = "saving"
    EVALUATING = "evaluating"
    BETWEEN_STEPS = "between steps"
    """In the script's own code after a backward pass or a step."""
    ENDED = "ended"


ESTIMATED_PHASES = {
    Phase.LOADING: RunPhase.LOAD,
    Phase.PREPARING: RunPhase.INITIALISE,
    Phase.FORWARD: RunPhase.FORWARD,
    Phase.BACKWARD: RunPhase.BACKWARD,
    Phase.OPTIMIZER_STEP: RunPhase.STEP,
    Phase.SAVING: RunPhase.SAVE,
}
"""The phase of an estimate that describes a rank's phase; the others have none."""


_PHASES = tuple(Phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePeak:
    """Peak GPU memory over all passes through one phase."""

    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankObservation:
    """A rank's phase and progress."""

    pid: int
    phase: Phase
    step: int
    """Optimizer steps done; a resumed Trainer continues its count."""
    num_steps: int
    """Total optimizer steps; 0 if unknown."""
    changed_at: float
    """Time of the last progress: a phase or a batch began or ended. Seconds since 1970."""
    longest_phase_s: float
    """Longest time without progress so far, in the phases of a step."""
    first_step: int = 0
    """The first step that ended in this process; 0 if none has."""
    first_step_at: float = 0.0
    """When it ended, in seconds since 1970."""
    dump_signal: int
    """Signal on which the rank writes its stacks; 0 while it can't."""
    dump_descriptor: int
    """Descriptor that it writes them to, whatever the script has opened there: compare before signalling."""
    host_bytes: int
    """Resident memory, at most a second old at the last progress."""
    checkpoint_step: int
    """Step of the last checkpoint, saved or resumed from."""
    checkpoint: str
    """Folder of the last checkpoint saved; "" if none."""
    peaks: dict[Phase, PhasePeak]
    """GPU memory by phase; empty without a GPU."""
    collectives: int = 0
    """Collectives that the rank has called, in all of its process groups together; about a second old."""

    @property
    def s_per_step(self) -> float | None:
        """Seconds a step since the first, with evaluation and saving; None before the second step."""
        num_steps = self.step - self.first_step
        if not self.first_step or num_steps < 1 or self.changed_at <= self.first_step_at:
            return None
        return (self.changed_at - self.first_step_at) / num_steps


_HEAD = struct.Struct("<QqqqqdddqqqqqQ")
"""A sequence number, the fields up to `checkpoint_step` (the phase by its index), and the number again;
`first_step_at` is after the other times, `first_step` after the other numbers."""
_PEAKS = struct.Struct(f"<{2 * len(_PHASES)}q")
"""Allocated and reserved bytes of each phase; -1 if unset."""
_PATH = struct.Struct("<H1022s")
"""Length of the checkpoint's path, and its bytes."""
_PATH_AT = _HEAD.size + _PEAKS.size
_COLLECTIVES = struct.Struct("<q")
_COLLECTIVES_AT = _PATH_AT + _PATH.size
_LATEST = 253402300799.0
"""The last second that datetime knows, since 1970."""
_LARGEST_PID = 2**22
"""Of Linux (proc(5), pid_max)."""


class LiveFile:
    """The file that one rank keeps up to date.

    Each update is one pwrite(2) of some 100 bytes into the page cache, which survives a killed process. A
    memory mapping would end the process by SIGBUS if the disk is full. Writing raises OSError if the disk is
    full or gone.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = OwnFile(live_file(folder, rank))
        self._sequence = 0
        unset = _PEAKS.pack(*(-1,) * 2 * len(_PHASES)) + _PATH.pack(0, b"") + _COLLECTIVES.pack(0)
        self._file.write_at(_HEAD.size, unset)

    def write(self, phase: Phase, numbers: tuple[int, ...], times: tuple[float, float, float]) -> None:
        """Write the rank's state.

        Args:
            phase: its phase.
            numbers: pid, step, num_steps, dump_signal, dump_descriptor, host_bytes, checkpoint_step,
                first_step.
            times: changed_at, longest_phase_s, first_step_at.
        """
        self._sequence += 1
        pid, step, num_steps, *rest = numbers
        place = _PHASES.index(phase)
        head = _HEAD.pack(self._sequence, pid, place, step, num_steps, *times, *rest, self._sequence)
        self._file.write_at(0, head)

    def write_peak(self, phase: Phase, peak: PhasePeak) -> None:
        """Write the peak memory of a phase."""
        both = struct.pack("<2q", peak.allocated_bytes, peak.reserved_bytes)
        self._file.write_at(_HEAD.size + len(both) * _PHASES.index(phase), both)

    def write_checkpoint(self, path: str) -> None:
        """Write the folder of the last checkpoint; a path that is too long is cut at its start."""
        data = os.fsencode(path)[-1022:]
        self._file.write_at(_PATH_AT, _PATH.pack(len(data), data))

    def write_collectives(self, collectives: int) -> None:
        """Write the number of collectives called so far; another thread than that of `write` may do it."""
        self._file.write_at(_COLLECTIVES_AT, _COLLECTIVES.pack(collectives))


def live_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's live file."""
    return folder / f"rank{rank}.live"


def read_observation(folder: Path, rank: int) -> RankObservation | None:
    """Return a rank's last written state; None if there is none that can be read."""
    try:
        data = read_bounded(live_file(folder, rank), most_bytes=1 << 16)
        first, pid, place, step, num_steps, at, longest, first_at, *rest, last = _HEAD.unpack_from(data)
        number, descriptor, host, saved, first_step = rest
        peaks = _PEAKS.unpack_from(data, _HEAD.size)
        length, path = _PATH.unpack_from(data, _PATH_AT)
        (collectives,) = _COLLECTIVES.unpack_from(data, _COLLECTIVES_AT)
        phase = _PHASES[place]
    except (OSError, struct.error, IndexError):
        return None
    if first != last or first == 0:  # read during a write (the next read succeeds), or before the first
        return None
    if not (all(0 <= time <= _LATEST for time in (at, longest, first_at)) and 0 < pid <= _LARGEST_PID):
        return None
    if min(place, step, num_steps, first_step, host) < 0:
        return None
    return RankObservation(
        pid=pid,
        phase=phase,
        step=step,
        num_steps=num_steps,
        changed_at=at,
        longest_phase_s=longest,
        first_step=first_step,
        first_step_at=first_at,
        dump_signal=number,
        dump_descriptor=descriptor,
        host_bytes=host,
        checkpoint_step=saved,
        checkpoint=os.fsdecode(path[:length]),
        peaks={
            phase: PhasePeak(allocated_bytes=allocated, reserved_bytes=reserved)
            for phase, allocated, reserved in zip(_PHASES, peaks[::2], peaks[1::2], strict=True)
            if allocated >= 0
        },
        collectives=collectives,
    )
