"""Watches the ranks of a run: reports progress, and detects hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from zerofit.core.processes import is_running
from zerofit.core.rank_observation import Phase, RankObservation, read_observation
from zerofit.core.rank_record import read_record
from zerofit.core.units import format_bytes, format_duration
from zerofit.launching.diagnose import Hang, describe
from zerofit.launching.stacks import OF_BACKWARD, Stack, dump_stacks, stack_file
from zerofit.launching.work import LOG_COPIER, WorkMeter, is_stopped

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from zerofit.core.observer import Observer

_LIMIT_S = 1800.0
"""A run hangs if it has made no progress for this long. ASSUMPTION; gloo's own limit of a collective
(torch/distributed/constants.py), which many scripts raise."""
_LEAST_LIMIT_IN_STEPS_S = 300.0
_LIMIT_IN_PHASES = 20
"""Once each rank has done a step, and all of them are inside one: 300 s, or 20 times the longest phase if
that is more. ASSUMPTION: no working step is slower; NCCL's own limit of a collective is 600 s (same file)."""
_WORK_FACTOR = 10
"""A rank for which others wait, or that is inside a step, and works, may take this many times as long.
ASSUMPTION: a main process that prepares data alone ends in time; a loop without an end never does."""
_LOOKS_PER_LIMIT = 5
"""How often the ranks' work is measured in a limit."""
_CHECK_EVERY_S = 1.0
_LAUNCHER_ENDS_S = 10.0
"""For the launcher to end after its ranks, however short the limit is. ASSUMPTION."""
_SUSPENDED_S = 30.0
"""A check delayed this much means that this process, or the machine, was suspended: all limits are reset."""
_REPORT_EVERY_S = 60.0
_REPORT_START_EVERY_S = 30.0
"""Before the first step, when nobody knows whether anything happens. ASSUMPTION."""
_BEFORE_STEPS = {
    Phase.LOADING: "loading libraries, model and data",
    Phase.PREPARING: "preparing the model and the optimizer",
}
_IN_A_STEP = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER_STEP)
_OUTSIDE_STEPS = (Phase.LOADING, Phase.PREPARING, Phase.SAVING, Phase.EVALUATING)
_PHASES = tuple(Phase)
_SAME_TIME_S = 5.0
"""Ranks whose last progress is this close together stopped at the same time: which was first is luck.
ASSUMPTION."""
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
    is_one_of_nodes: bool = False
    """True if the run has ranks that are not watched here."""
    hang: Hang | None = None
    """Set once the run hangs."""
    _looked_at: float = field(default_factory=time.monotonic)
    _began_at: float = field(default_factory=time.monotonic)
    _told_at: float = field(default_factory=time.monotonic)
    _first: tuple[float, int] | None = None
    """Time and step of the first check at which a step was done."""
    _seen: dict[int, tuple[float, int]] = field(default_factory=dict)
    """By rank: its own time of the last progress, and its collectives."""
    _moved_at: float = field(default_factory=time.monotonic)
    """When progress of any rank was last seen here."""
    _measured_at: float = 0.0
    _meter: WorkMeter = field(default_factory=WorkMeter)
    _worked_at: dict[int, float] = field(default_factory=dict)
    """By process id of a rank or the launcher: when it, or what is below it, was last seen to work."""
    _stacks: dict[int, Stack] = field(default_factory=dict)
    _stuck: frozenset[int] = frozenset()
    """Ranks that waited in the same collective in the last two stacks."""
    _next_stacks_at: float = 0.0
    _stopped_at: dict[int, float] = field(default_factory=dict)
    """When a signal has stopped a process of the run: the launcher, a rank, or one below it."""
    _has_resumed: bool = False
    """True once the launcher was stopped by a signal, and resumed here."""
    _gone_at: float | None = None
    """When no rank was left."""
    _last: tuple[float, int] | None = None
    """The first rank's own time and step at the last change of its step."""
    _paces: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_STEP_TIMES))
    """Seconds per step between checks at which it had changed."""

    def look(self, launcher: int | None = None) -> bool:
        """Check once a second; return True if the run hangs, after writing the stacks of all ranks.

        Args:
            launcher: process id of the one that starts the ranks; None if it is not watched.
        """
        now = time.monotonic()
        if now - self._looked_at < _CHECK_EVERY_S:
            return False
        if now - self._looked_at > _SUSPENDED_S:
            self._moved_at = now
            self._stopped_at.clear()
        self._looked_at = now
        found = self.observations()
        self._note_pace(found)
        self._tell(found, now)
        if self.hang is not None:
            return True
        self._note_stopped(found, launcher, now)
        if self.limit_s != 0 and self._hangs(found, launcher, now) and not self._resume_launcher(launcher):
            self.hang = self._verdict(found, launcher, now)
            self._resume(*self._stopped_at)  # otherwise they could not even be told to end
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

    def clear_unused(self) -> None:
        """Remove the ranks' stack files, unless the run hung."""
        for rank in self.ranks:
            file = stack_file(self.ranks_folder, rank)
            if self.hang is None or (file.exists() and not file.stat().st_size):
                file.unlink(missing_ok=True)

    def _note_pace(self, found: Mapping[int, RankObservation]) -> None:
        first = found.get(self.ranks[0])
        if first is None or first.step == 0 or (self._last and first.step <= self._last[1]):
            return
        if self._last:
            self._paces.append((first.changed_at - self._last[0]) / (first.step - self._last[1]))
        self._last = first.changed_at, first.step

    def _note_stopped(self, found: Mapping[int, RankObservation], launcher: int | None, now: float) -> None:
        """Report a process that was stopped by a signal (SIGSTOP): ranks and launcher at once."""
        watched = {state.pid: f"rank {rank}" for rank, state in found.items()}
        watched |= {} if launcher is None else {launcher: "accelerate launch"}
        for rank, state in found.items():
            tree = self._meter.trees.get(state.pid)
            for process in () if tree is None else tree.stopped:
                watched.setdefault(process.pid, _role_of(process, rank))
        states = {state.pid: describe(state) for state in found.values()}
        for pid, who in watched.items():
            if not _is_stopped(pid):
                self._stopped_at.pop(pid, None)
            elif pid not in self._stopped_at:
                self._stopped_at[pid] = now
                where = f", in {states[pid]}" if pid in states else ""
                self.observer.say(
                    f"{who} (process {pid}) is stopped by a signal{where}; `kill -CONT {pid}` resumes it"
                )

    def _resume(self, *pids: int) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _resume_launcher(self, launcher: int | None) -> bool:
        """Resume a launcher that a signal has stopped, once; return True if it was. Ranks may wait for it.

        It has their store (TCPStore), and tells how they ended.
        """
        if launcher is None or launcher not in self._stopped_at or self._has_resumed:
            return False
        self.observer.say(f"nothing goes on: accelerate launch (process {launcher}) is resumed")
        self._resume(launcher)
        self._has_resumed, self._moved_at, self._gone_at = True, time.monotonic(), None
        self._worked_at.clear()
        return True

    def _hangs(self, found: Mapping[int, RankObservation], launcher: int | None, now: float) -> bool:
        """Return True if there was neither progress nor work within the limit."""
        seen = {rank: (state.changed_at, state.collectives) for rank, state in found.items()}
        if seen != self._seen:
            self._seen, self._moved_at = seen, now
            self._stuck, self._stacks, self._next_stacks_at = frozenset(), {}, 0.0
            self._worked_at.clear()
            self._meter.forget()
        limit_s = self._limit_s(found)
        have_begun = len(found) == len(self.ranks)
        if have_begun and not any(is_running(state.pid) for state in found.values()):
            return launcher is not None and self._launcher_hangs(now, limit_s)
        stopped = (self._stopped_at.get(state.pid, now) for state in found.values())
        if have_begun and any(now - at > limit_s for at in stopped):
            return True
        still_s, every_s = now - self._moved_at, max(_CHECK_EVERY_S, limit_s / _LOOKS_PER_LIMIT)
        if still_s < every_s:
            return False
        if now - self._measured_at >= every_s:
            self._measured_at = now
            # Ranks that have not begun are below the launcher.
            ranks = [state.pid for state in found.values()]
            pids = ranks if have_begun or launcher is None else [*ranks, launcher]
            self._worked_at.update(dict.fromkeys(self._meter.look(pids), now))
        if still_s <= limit_s or (not have_begun and launcher is None):
            return False
        if not any(now - at <= limit_s for at in self._worked_at.values()):
            return not self._may_wait_for_nodes(found, still_s, limit_s)
        return have_begun and self._works_in_vain(found, now, limit_s)

    def _launcher_hangs(self, now: float, limit_s: float) -> bool:
        """Return True if the launcher does not end after its ranks."""
        if self._gone_at is None:
            self._gone_at = now
        # torchrun waits up to 300 s for other nodes (torch/distributed/elastic/agent/server/api.py).
        return now - self._gone_at > max(limit_s, _LIMIT_S if self.is_one_of_nodes else _LAUNCHER_ENDS_S)

    def _may_wait_for_nodes(
        self, found: Mapping[int, RankObservation], still_s: float, limit_s: float
    ) -> bool:
        """Return True if the rank that all of these wait for may be on another node, and work there."""
        return (
            self.is_one_of_nodes
            and all(state.phase in _OUTSIDE_STEPS for state in found.values())
            and still_s <= max(_WORK_FACTOR * limit_s, _LIMIT_S)
        )

    def _works_in_vain(self, found: Mapping[int, RankObservation], now: float, limit_s: float) -> bool:
        """Return True if only ranks work that wait, or if those that others wait for have worked too long."""
        still_s = now - self._moved_at
        if (len(self.ranks) > 1 or self.is_one_of_nodes) and now >= self._next_stacks_at:
            self._next_stacks_at = now + max(limit_s, still_s) / _LOOKS_PER_LIMIT
            before, self._stacks = self._stacks, dump_stacks(found, self.ranks_folder)
            self._stuck = frozenset(
                rank
                for rank, stack in self._stacks.items()
                if stack.collective is not None and stack == before.get(rank)
            )
        if self._working(found, now, limit_s) <= self._stuck and not self.is_one_of_nodes:
            return True  # a GPU's rank uses a core while it waits
        if still_s <= _WORK_FACTOR * limit_s or _is_full(self.ranks_folder):  # then live files are old
            return False
        return bool(self._stuck) or any(state.phase in _IN_A_STEP for state in found.values())

    def _working(self, found: Mapping[int, RankObservation], now: float, limit_s: float) -> set[int]:
        """Return the ranks that have worked within the limit."""
        return {rank for rank, state in found.items() if now - self._worked_at.get(state.pid, 0) <= limit_s}

    def _limit_s(self, found: Mapping[int, RankObservation]) -> float:
        if self.limit_s is not None:
            return self.limit_s
        longest_s = max((state.longest_phase_s for state in found.values()), default=0.0)
        phases = {state.phase for state in found.values()}
        is_training = all(state.step for state in found.values()) and not phases.isdisjoint(_IN_A_STEP)
        in_steps = is_training and phases.isdisjoint(_OUTSIDE_STEPS)
        return max(_LEAST_LIMIT_IN_STEPS_S if in_steps else _LIMIT_S, _LIMIT_IN_PHASES * longest_s)

    def _verdict(self, found: Mapping[int, RankObservation], launcher: int | None, now: float) -> Hang:
        still_s = now - self._moved_at
        if self._gone_at is not None:
            return Hang(
                rank=None,
                phase=None,
                sentence=f"hang: accelerate launch (process {launcher}) has not ended within "
                f"{now - self._gone_at:.0f} s of its ranks",
            )
        if missing := [rank for rank in self.ranks if rank not in found]:
            return self._not_begun(missing[0], found, launcher, still_s)
        self._stacks = {**self._stacks, **dump_stacks(found, self.ranks_folder)}
        rank, *others = self._cause_first(found)
        lines = [self._state(shown, found[shown]) for shown in (rank, *others[:_SHOWN_RANKS])]
        if found[rank].phase is not Phase.ENDED:
            lines[0] += self._what_others_call(rank, others)
        if len(others) > _SHOWN_RANKS:
            lines.append(f"{len(others) - _SHOWN_RANKS} more wait")
        working = sorted(self._working(found, now, self._limit_s(found)))
        though = f", though rank {', '.join(map(str, working))} used CPU time" if working else ""
        return Hang(
            rank=rank,
            phase=found[rank].phase,
            sentence=f"hang: no rank has made progress for {still_s:.0f} s{though}; {'; '.join(lines)}; "
            f"their stacks are in {self.ranks_folder}",
        )

    def _not_begun(
        self, rank: int, found: Mapping[int, RankObservation], launcher: int | None, still_s: float
    ) -> Hang:
        words = [f"hang: no rank has made progress for {still_s:.0f} s"]
        if launcher in self._stopped_at:
            words.append(f"accelerate launch (process {launcher}) is stopped by a signal")
        words.append(f"rank {rank} has not begun")
        words += [f"rank {other} is in {describe(state)}" for other, state in found.items()][:_SHOWN_RANKS]
        return Hang(rank=rank, phase=None, sentence="; ".join(words))

    def _cause_first(self, found: Mapping[int, RankObservation]) -> list[int]:
        """Return the ranks, that which the others wait for first."""
        calls = self._calls(found)
        same = Counter(calls.values())
        first_at = min(state.changed_at for state in found.values())

        def key(rank: int) -> tuple[bool, bool, bool, bool, bool, int, bool, bool, int, int, bool, int]:
            state = found[rank]
            return (
                is_running(state.pid) or state.phase is Phase.ENDED,
                not self._has_stopped(state.pid),
                self._failure(rank) is None,
                state.phase is not Phase.ENDED,
                state.phase is Phase.ENDED and not is_running(state.pid),
                same[calls[rank]] if calls[rank] else 0,  # the odd one of those that wait
                # Of as many ranks in each of several collectives, those that left the common way of training.
                state.phase in _IN_A_STEP,
                not self._is_of_script(rank),
                # Behind the others, but by no moment, which differs from run to run.
                state.step,
                _PHASES.index(state.phase),
                state.changed_at > first_at + _SAME_TIME_S,
                rank,
            )

        return sorted(found, key=key)

    def _calls(self, ranks: Iterable[int]) -> dict[int, str | None]:
        """Return what each rank waits in, and where; None for one that waits for no other."""
        return {rank: self._stacks[rank].call if rank in self._stacks else None for rank in ranks}

    def _what_others_call(self, rank: int, others: Sequence[int]) -> str:
        """Return how the rank that the others wait for differs from them, in words; "" if it does not."""
        own, calls = self._collective(rank), self._calls((rank, *others))
        lacking = next((name for other in others if (name := self._collective(other))), None)
        if not own:
            return f", without the {lacking} of the others" if lacking else ""
        is_alone = bool(others) and all(calls[other] != calls[rank] for other in others)
        return ", which no other rank has called" if is_alone else ""

    def _has_stopped(self, pid: int) -> bool:
        """Return True if a signal has stopped a rank, or a process below it."""
        tree = self._meter.trees.get(pid)
        return not self._stopped_at.keys().isdisjoint((pid, *(tree.pids if tree else ())))

    def _failure(self, rank: int) -> str | None:
        """Return the error that has ended a rank's script; None if there is none."""
        record = read_record(self.ranks_folder, rank)
        return record.error_type or f"exit code {record.exit_code}" if record and record.exit_code else None

    def _state(self, rank: int, observation: RankObservation) -> str:
        pid, where = observation.pid, describe(observation)
        if pid in self._stopped_at:
            return f"rank {rank} (process {pid}) is stopped by a signal in {where}"
        if failure := self._failure(rank):
            left = ", and its process does not end" if is_running(pid) else ""
            return f"rank {rank} has failed with {failure}{left}{self._place(rank)}"
        if not is_running(pid) and observation.phase is not Phase.ENDED:
            return f"rank {rank} (process {pid}) has gone without a record, in {where}"
        if observation.phase is Phase.ENDED:
            ended = f"rank {rank} has ended after {observation.step} steps"
            runs_on = f"{ended}, but its process runs on, in an exit handler or a thread{self._place(rank)}"
            return runs_on if is_running(pid) else ended
        collective = self._collective(rank)
        waits = f"waits in {collective}{self._caller(rank, collective)}, in" if collective else "is in"
        below = self._stopped_below(rank, pid)
        at = "" if collective else self._place(rank)
        return f"rank {rank} {waits} {where}{at}{f', and {below} is stopped by a signal' if below else ''}"

    def _stopped_below(self, rank: int, pid: int) -> str | None:
        """Return the first process below a rank that a signal has stopped, in words; None without one."""
        tree = self._meter.trees.get(pid)
        for process in () if tree is None else tree.stopped:
            if process.pid in self._stopped_at and process.pid != pid:
                return f"{_role_of(process, rank)} (process {process.pid})"
        return None

    def _collective(self, rank: int) -> str | None:
        """Return the collective in which a rank waits; None if it is in none."""
        stack = self._stacks.get(rank, Stack())
        in_backward = stack.is_backward_without_python and self._is_ahead(rank)
        return stack.collective or (OF_BACKWARD if in_backward else None)

    def _is_ahead(self, rank: int) -> bool:
        """Return True if another rank has not called, or not left, the last collective of this one."""
        called = self._seen[rank][1]
        waiting = {other for other, stack in self._stacks.items() if stack.collective is not None}
        counts = {other: num for other, (_, num) in self._seen.items() if other != rank}
        return any(num < called or (num == called and other in waiting) for other, num in counts.items())

    def _is_of_script(self, rank: int) -> bool:
        """Return True if a rank waits in a collective that the script asked for, outside of a step's own."""
        return rank in self._stacks and self._stacks[rank].is_of_script

    def _place(self, rank: int) -> str:
        """Return the line of the script that a rank is in, in words; "" if unknown."""
        place = self._stacks[rank].script if rank in self._stacks else None
        return f"{', in ' if '() at ' in place else ', at '}{place}" if place else ""

    def _caller(self, rank: int, collective: str) -> str:
        """Return who called a collective, in words; "" if unknown."""
        place = (self._stacks[rank].script or "").removeprefix(f"{collective}() at ")
        return f", called {'by' if '() at ' in place else 'at'} {place}" if place else ""

    def _tell(self, found: Mapping[int, RankObservation], now: float) -> None:
        """Report the run's progress once a minute; before its first step, what the ranks do."""
        first = found.get(self.ranks[0])
        if first is None or first.step == 0:
            if now - self._told_at >= _REPORT_START_EVERY_S:
                self._told_at = now
                self.observer.progress(starting_line(found, self.ranks, now - self._began_at))
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


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return is_stopped(psutil.Process(pid))
    return False


def _role_of(process: psutil.Process, rank: int) -> str:
    """Return what a process below a rank does, in words."""
    with contextlib.suppress(psutil.Error):
        if process.name() == LOG_COPIER:
            return f"the process that copies rank {rank}'s output"
    return f"a process started by rank {rank}"


def _is_full(folder: Path) -> bool:
    """Return True if nothing can be written into a folder."""
    with contextlib.suppress(OSError):
        return os.statvfs(folder).f_bavail == 0
    return True


def starting_line(found: Mapping[int, RankObservation], ranks: Iterable[int], waited_s: float) -> str:
    """Return what the ranks do before the first step in one line."""
    doing: dict[str, list[str]] = {}
    for rank in ranks:
        state = found.get(rank)
        words = "starting" if state is None else _BEFORE_STEPS.get(state.phase) or describe(state)
        doing.setdefault(words, []).append(str(rank))
    parts = (
        f"rank{'s' * (len(alike) > 1)} {', '.join(alike[:_SHOWN_RANKS])}"
        f"{f' and {len(alike) - _SHOWN_RANKS} more' * (len(alike) > _SHOWN_RANKS)}: {words}"
        for words, alike in doing.items()
    )
    return f"no step after {format_duration(waited_s)}; {'; '.join(parts)}"


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
