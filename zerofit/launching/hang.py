"""Watches the ranks of a run: reports progress, and detects hangs."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import statistics
import subprocess
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from zerofit.core.own_file import identity_of
from zerofit.core.rank_observation import Phase, RankObservation, read_observation
from zerofit.core.units import format_bytes, format_duration
from zerofit.launching.diagnose import Hang, describe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zerofit.core.observer import Observer

_MIN_LIMIT_S = 300.0
_LIMIT_IN_PHASES = 20
"""A run hangs if it has made no progress for 300 s, or 20 times its longest phase if that is more.
ASSUMPTION: no working step is slower; torch's own limit is 600 s for NCCL and 1800 s for gloo
(torch/distributed/constants.py)."""
_FIRST_STEP_LIMIT_S = 1800.0
"""Limit for the first step, which may compile the model. ASSUMPTION, as gloo's limit."""
_CHECK_EVERY_S = 1.0
_SUSPENDED_S = 30.0
"""A check delayed this much means that this process, or the machine, was suspended: all limits are reset."""
_REPORT_EVERY_S = 60.0
_DUMP_S = 5.0
"""Time limit for a rank to write its stacks. ASSUMPTION: it is one write from a signal handler."""
_WORKER_DUMP_S = 0.1
"""The same for a DataLoader worker, which writes into its rank's file. ASSUMPTION."""
_PY_SPY_S = 30.0
_TIMED_PHASES = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER_STEP)
_UNTIMED_PHASES = (Phase.LOADING, Phase.PREPARING, Phase.SAVING, Phase.EVALUATING)
"""Phases without a time limit."""
_BUSY_CORE_SHARE = 0.2
"""Of one core: a rank in the script's own code that uses more is working. ASSUMPTION."""
_COLLECTIVE = re.compile(r'distributed_c10d\.py", line \d+ in (?!wrapper\b)(\w+)')
_SHOWN_RANKS = 4
_MIN_STEP_TIMES = 3
_KEPT_STEP_TIMES = 1000
"""Number of recent checks with a step change, whose median is the step's time."""


@dataclass(slots=True, kw_only=True)
class RunWatch:
    """Watches a run's ranks by their live files, and detects hangs."""

    ranks_folder: Path
    ranks: range
    limit_s: float | None
    """Time without progress after which a run counts as hung; 0 for never, None to adapt to the run."""
    observer: Observer
    predicted_bytes: int | None = None
    """Predicted peak of live tensors on a GPU."""
    hang: Hang | None = None
    """Set once the run hangs."""
    _looked_at: float = field(default_factory=time.monotonic)
    _told_at: float = field(default_factory=time.monotonic)
    _first: tuple[float, int] | None = None
    """Time and step of the first check at which a step was done."""
    _seen: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By rank: its own time of the last progress, and when that was first seen here (monotonic)."""
    _stopped_at: dict[int, float] = field(default_factory=dict)
    _last: tuple[float, int] | None = None
    """The first rank's own time and step at the last change of its step."""
    _paces: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_STEP_TIMES))
    """Seconds per step between checks at which it had changed."""

    def look(self) -> bool:
        """Check once a second; return True if the run hangs, after writing the stacks of all ranks."""
        now = time.monotonic()
        if now - self._looked_at < _CHECK_EVERY_S:
            return False
        if now - self._looked_at > _SUSPENDED_S:
            self._seen.clear()
            self._stopped_at.clear()
        self._looked_at = now
        found = self.observations()
        self._note_stopped(found, now)
        self._note_pace(found)
        self._tell(found, now)
        if self.hang is None and self.limit_s != 0 and self._hangs(found, now):
            still_s = now - max(at for _, at in self._seen.values())
            dump_stacks(found, self.ranks_folder)
            self.hang = self._verdict(found, still_s)
            for rank in self._stopped_at:  # otherwise it could not even be told to end
                with contextlib.suppress(ProcessLookupError):
                    os.kill(found[rank].pid, signal.SIGCONT)
        return self.hang is not None

    def observations(self) -> dict[int, RankObservation]:
        """Return the current or last state of each rank that has begun."""
        found = {rank: read_observation(self.ranks_folder, rank) for rank in self.ranks}
        return {rank: state for rank, state in found.items() if state is not None}

    @property
    def step_time_s(self) -> float | None:
        """The median time of an optimizer step; None if too few were seen.

        A median, since some of the time between two checks is spent saving or evaluating.
        """
        return statistics.median(self._paces) if len(self._paces) >= _MIN_STEP_TIMES else None

    def _note_pace(self, found: Mapping[int, RankObservation]) -> None:
        first = found.get(self.ranks[0])
        if first is None or first.step == 0 or (self._last and first.step <= self._last[1]):
            return
        if self._last:
            self._paces.append((first.changed_at - self._last[0]) / (first.step - self._last[1]))
        self._last = first.changed_at, first.step

    def _note_stopped(self, found: Mapping[int, RankObservation], now: float) -> None:
        """Report a process that was suspended (SIGSTOP), at once."""
        for rank, state in found.items():
            if not _is_stopped(state.pid):
                self._stopped_at.pop(rank, None)
            elif rank not in self._stopped_at:
                self._stopped_at[rank] = now
                where = f"rank {rank} (process {state.pid}) is stopped by a signal, in {describe(state)}"
                self.observer.say(f"{where}; `kill -CONT {state.pid}` resumes it")

    def _hangs(self, found: Mapping[int, RankObservation], now: float) -> bool:
        """Return True if no rank has made progress within the limit, and none is in an untimed phase."""
        for rank, state in found.items():
            if rank not in self._seen or self._seen[rank][0] != state.changed_at:
                self._seen[rank] = state.changed_at, now
        if len(found) < len(self.ranks):
            return False
        limit_s = self._limit_s(found)
        if any(now - at > limit_s for at in self._stopped_at.values()):
            return True
        if any(now - at <= limit_s for _, at in self._seen.values()):
            return False
        others = [state for rank, state in found.items() if rank not in self._stopped_at]
        return (
            all(other.phase not in _UNTIMED_PHASES for other in others)
            and any(other.phase in _TIMED_PHASES for other in others)
            and not any(other.phase is Phase.BETWEEN_STEPS and _is_busy(other.pid) for other in others)
        )

    def _limit_s(self, found: Mapping[int, RankObservation]) -> float:
        if self.limit_s is not None:
            return self.limit_s
        longest_s = max(state.longest_phase_s for state in found.values())
        least_s = _MIN_LIMIT_S if all(state.step for state in found.values()) else _FIRST_STEP_LIMIT_S
        return max(least_s, _LIMIT_IN_PHASES * longest_s)

    def _verdict(self, found: Mapping[int, RankObservation], still_s: float) -> Hang:
        collectives = {rank: self._collective(rank) for rank in found}

        def cause_first(rank: int) -> tuple[bool, bool, bool, int, float]:
            state = found[rank]
            goes_on = rank not in self._stopped_at
            return (
                goes_on,
                state.phase is not Phase.ENDED,
                collectives[rank] is not None,
                state.step,
                state.changed_at,
            )

        rank, *others = sorted(found, key=cause_first)
        lines = [self._state(rank, found[rank], collectives[rank])]
        lines += [self._state(other, found[other], collectives[other]) for other in others[:_SHOWN_RANKS]]
        if len(others) > _SHOWN_RANKS:
            lines.append(f"{len(others) - _SHOWN_RANKS} more wait")
        lacking = next((collectives[other] for other in others if collectives[other]), None)
        without = f", without the {lacking} of the others" if lacking and not collectives[rank] else ""
        lines[0] += without
        return Hang(
            rank=rank,
            phase=found[rank].phase,
            sentence=f"hang: no rank has made progress for {still_s:.0f} s; {'; '.join(lines)}; "
            f"their stacks are in {self.ranks_folder}",
        )

    def _state(self, rank: int, observation: RankObservation, collective: str | None) -> str:
        if observation.phase is Phase.ENDED:
            return f"rank {rank} has ended after {observation.step} steps"
        if rank in self._stopped_at:
            return (
                f"rank {rank} (process {observation.pid}) is stopped by a signal in {describe(observation)}"
            )
        return f"rank {rank} {f'waits in {collective}, ' if collective else 'is '}in {describe(observation)}"

    def _collective(self, rank: int) -> str | None:
        """Return the collective in a rank's stacks; None if there is none."""
        with contextlib.suppress(OSError):
            found = _COLLECTIVE.search(
                _stack_file(self.ranks_folder, rank).read_text(encoding="utf-8", errors="replace")
            )
            return found and found[1]
        return None

    def clear_unused(self) -> None:
        """Remove stack files that no rank has written to."""
        for rank in self.ranks:
            file = _stack_file(self.ranks_folder, rank)
            if not _size(file):
                file.unlink(missing_ok=True)

    def _tell(self, found: Mapping[int, RankObservation], now: float) -> None:
        """Report the run's progress once a minute."""
        first = found.get(self.ranks[0])
        if first is None or first.step == 0:
            return
        if self._first is None:
            self._first = now, first.step
        if now - self._told_at < _REPORT_EVERY_S:
            return
        self._told_at = now
        self.observer.progress(
            progress_line(tuple(found.values()), self._s_per_step(first.step, now), self.predicted_bytes)
        )

    def _s_per_step(self, step: int, now: float) -> float | None:
        if self._first is None or step == self._first[1]:
            return None
        return (now - self._first[0]) / (step - self._first[1])


def dump_stacks(ranks: Mapping[int, RankObservation], folder: Path) -> None:
    """Make ranks and their DataLoader workers write their stacks to `rank<N>.stack` in the ranks' folder.

    For a rank that does not respond, or whose script has closed the file, py-spy writes them, if installed.
    """
    for rank, state in ranks.items():
        with contextlib.suppress(ProcessLookupError):
            if _writes_to(state.pid, state.dump_descriptor, _stack_file(folder, rank)):
                os.kill(state.pid, state.dump_signal)
    until = time.monotonic() + _DUMP_S
    silent = list(ranks)
    while silent and time.monotonic() < until:
        time.sleep(_DUMP_S / 50)
        silent = [rank for rank in silent if not _size(_stack_file(folder, rank))]
    for rank in ranks.keys() - silent:
        _dump_workers(ranks[rank], _stack_file(folder, rank))
    if silent and (py_spy := shutil.which("py-spy")):
        for rank in silent:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                command = [py_spy, "dump", "--nonblocking", "--pid", str(ranks[rank].pid)]
                done = subprocess.run(command, capture_output=True, timeout=_PY_SPY_S, check=False)
                _stack_file(folder, rank).write_bytes(done.stdout)


def _dump_workers(rank: RankObservation, file: Path) -> None:
    """Make a rank's DataLoader workers, forks that inherited its signal handler, write their stacks."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(rank.pid).children():
            with contextlib.suppress(psutil.Error, OSError):
                # Others would be killed by it, or write into a file of the script's.
                if _handles(process.pid, rank.dump_signal) and _writes_to(
                    process.pid, rank.dump_descriptor, file
                ):
                    process.send_signal(rank.dump_signal)
                    time.sleep(_WORKER_DUMP_S)


def _handles(pid: int, number: int) -> bool:
    """Return True if a process has a handler for a signal (proc_pid_status(5), SigCgt)."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def _writes_to(pid: int, descriptor: int, file: Path) -> bool:
    """Return True if a process has a file open under a number: its script may have closed and reused it."""
    found = identity_of(f"/proc/{pid}/fd/{descriptor}")
    return found is not None and found == identity_of(file)


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.stack"


def progress_line(
    ranks: Sequence[RankObservation], s_per_step: float | None, predicted_bytes: int | None
) -> str:
    """Return step, remaining time and memory in one line; steps of the first rank, memory of the fullest."""
    first = ranks[0]
    words = [f"step {first.step}" + (f" of {first.num_steps}" if first.num_steps else "")]
    if first.num_steps and s_per_step is not None:
        words.append(f"{format_duration((first.num_steps - first.step) * s_per_step)} left")
    peaks = [peak.allocated_bytes for rank in ranks for peak in rank.peaks.values()]
    if peaks:
        predicted = f" ({format_bytes(predicted_bytes)} predicted)" if predicted_bytes else ""
        words.append(f"tensors of at most {format_bytes(max(peaks))} on a GPU{predicted}")
    else:
        words.append(f"{format_bytes(max(rank.host_bytes for rank in ranks))} of host memory in a rank")
    return ", ".join(words)


def closing_line(ranks: Sequence[RankObservation], duration_s: float, predicted_bytes: int | None) -> str:
    """Return time, steps and peak memory of a successful run in one line; only its time if not observed."""
    words = f"ended well after {format_duration(duration_s)}"
    if ranks and not ranks[0].step:
        return f"{words}; no optimizer step was seen"
    return f"{words}, {progress_line(ranks, None, predicted_bytes)}" if ranks else words


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


def _is_busy(pid: int) -> bool:
    """Return True if a process or its children use CPU time within a second."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        processes = [process, *process.children(recursive=True)]

        def used_s() -> float:
            return sum(sum(process.cpu_times()[:2]) for process in processes if process.is_running())

        before_s = used_s()
        time.sleep(_CHECK_EVERY_S)
        return used_s() - before_s > _BUSY_CORE_SHARE * _CHECK_EVERY_S
    return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
