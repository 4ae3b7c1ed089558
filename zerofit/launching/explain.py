"""Explains a failed run from its logs: the earliest root cause of any rank, and the lines that show it."""

from __future__ import annotations

import contextlib
import enum
import os
import re
import stat
import time
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING

from zerofit.core.bounded_read import open_stream
from zerofit.core.errors import UserError
from zerofit.launching.collectives import (
    group_of_rank,
    in_their_groups,
    mismatch_in,
    out_of_step,
    taken_down_rank,
    timed_out_rank,
    waits,
)
from zerofit.launching.failures import GPU_IS_FULL, KnownFailure, Role, failure_of, failures, shows_nothing
from zerofit.launching.frames import PYTHON, frame_in, script_of
from zerofit.launching.log_lines import LONGEST_SHOWN, read_lines, shown_line
from zerofit.launching.next_step import completed
from zerofit.launching.refine import refined
from zerofit.launching.timeline import EvidenceLine, keys_in_time

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from zerofit.launching.collectives import Collective
    from zerofit.launching.frames import Frame
    from zerofit.launching.log_lines import LogLine, Moment

_LOG_NAMES = re.compile(
    r"(?i)(\.(log|out|err|txt|stdout|stderr|output)(\.\d+)?|[.-][oe]\d+|stdout|stderr|std_(out|err)|log)$"
)
_MOST_FILES = 1000
_TELLS_WHAT_TO_DO = re.compile(
    r"(?i)\bplease (?!file|report|open an? issue|see)"
    r"|\b(must|should|has to|have to|needs? to) (be|have|use|set)\b"
    r"|\b(valid|supported|allowed|possible) (values|options|choices)\b|\byou (can|must|should|need)\b"
    r"|\b(set|use|pass|call|install) [`'\"]|\binstead\b"
)
"""Words of an exception that name what its library takes."""
_RANK_IN_PATH = re.compile(r"rank[_-]?(\d+)\.\w+$|(?:^|[/.-])(\d+)/(?:stdout|stderr)(?:\.log)?$")
"""rank3.log; 3/stderr.log of torchrun --log-dir."""
_EXCEPTION = re.compile(
    r"(?!\w*Warning)[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Timeout|Iteration)\b(?:: |:?$)"
)
_AFTER_FRAMES = re.compile(r"[A-Za-z_][\w.]*(: |:?$)")
_FRAME_AWAY = 6
"""Lines from a frame to the exception where there is no "Traceback": a SyntaxError, a cut log. ASSUMPTION."""
_NO_ERROR = re.compile(
    r"\W*+(?:[\w.]*\w\W++)?(?:DEBUG|INFO|WARNING)\b"
    r"|\W*[IW](?:\d{3,4} \d| [\w./]+:\d+\])"
    r'|\{(?:(?!"level":).)*"level": ?"(?i:debug|info|warn)'
    r"|(?:\S+:\d+: )?\w*Warning: "
)
"""A message that its program does not treat as an error: of logging, glog, JSON or Python's warnings."""
_NAMES_A_CAUSE = (
    "death signal",
    "received SIG",
    "KeyboardInterrupt",
    "CUDA initialization",
    "Name or service",
    "errno: 98",
    "_dynamo.exc",
    "failed to send a keep-alive heartbeat",
)
"""Parts of such messages that are failures all the same."""
_TRACEBACK = re.compile(
    r"(?:[╭─│ +|-]{0,300}|(\w{1,100}) {2,300}|[^\"'`]{0,200}(?:it/s|s/it|B/s)[^\]]{0,100}\] ?)"
    r"Traceback \(most recent call last\)"
)
"""Of Python, of rich in a box, of IPython, which names the exception in front of it, or behind tqdm's bar."""
_NEVER_RAISED = (
    "Exception ignored in",
    "--- Logging error ---",
    "Error in atexit._run_exitfuncs",
)
"""Python prints these exceptions and goes on."""
_OWN_ERROR = "error["
_DURING_HANDLING = "During handling of the above exception, another exception occurred"
_DIRECT_CAUSE = "The above exception was the direct cause of the following exception"
_ORIGINAL = "Original Traceback (most recent call last)"
"""Of a DataLoader's worker or a replica of DataParallel: the exception after it was raised there."""
_PASSED_ON = "reraise"
"""The function in which torch raises a worker's exception anew."""
_KEPT_LINES = 200
"""Lines searched back for a timestamp. ASSUMPTION: no traceback is longer."""
_MOST_FRAMES = 1000
"""Frames of a traceback that are kept: Python's default limit of recursion."""
_SHOWN_LINES = 3
_UNKNOWN, _TIME_LIMIT, _TIMED_OUT = "unknown-exception", "time-limit", "nccl-timeout"
_SOUNDS_DONE = re.compile(
    r"(?i)train_runtime|\b(finish(ed|es)?|completed?|done|saved|success\w*|ended|succeeded)\b"
    r"|exit(ed)? (with )?(code )?0\b|\b100%\||wandb: "
)
"""Last lines of runs that came to their end: Trainer's, tqdm's, wandb's, and scripts'. ASSUMPTION."""
_LOSES_PEER = ("peer-lost", "remote-error")
_RANK_FAILED = "rank-failed"
_OF_SEVERAL_RANKS = (*_LOSES_PEER, _TIMED_OUT)
"""Failures that a rank alone can't have: the connection that it lost is of its own, to a server."""


class CauseConfidence(enum.StrEnum):
    """How certain a cause is."""

    HIGH = "high"
    """The log shows a known root cause."""
    MEDIUM = "medium"
    """A message with many possible reasons, an unknown exception, or the rank that the others waited for."""
    LOW = "low"
    """The log only shows consequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedFailure:
    """A failure found in a log."""

    failure: KnownFailure
    at: EvidenceLine
    frame: str | None = None
    """The innermost frame of its traceback outside libraries, or else within, as file:line."""
    script: str | None = None
    """The script that its traceback begins in."""
    names_ranks: bool = False
    """True for a time-out that says which rank the others waited for, and where."""

    @property
    def confidence(self) -> CauseConfidence:
        """How certain it is that this is the cause."""
        if self.failure.role is not Role.ROOT:
            return CauseConfidence.MEDIUM if self.names_ranks else CauseConfidence.LOW
        return CauseConfidence.MEDIUM if self.failure.is_vague else CauseConfidence.HIGH


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a run failed, according to its logs."""

    cause: LoggedFailure | None
    """None if the logs show no failure."""
    others: tuple[LoggedFailure, ...]
    """Other failures, the first of each kind, earliest first."""
    num_lines: int
    files: tuple[str, ...]
    ends: tuple[EvidenceLine, ...] = ()
    """The last lines of logs that do not say that their run is done."""
    waits: tuple[str, ...] = ()
    """Ranks that others waited for in a collective, in words, according to NCCL's watchdog."""


@dataclass(slots=True, kw_only=True)
class _Traceback:
    """One rank's traceback, as read so far."""

    has_begun: bool = False
    is_ignored: bool = False
    """Python prints the next exception and goes on."""
    was_ignored: bool = False
    """The exception before, which a chained one replaces, was ignored."""
    frames: list[Frame] = field(default_factory=list)
    named: str | None = None
    """The exception that IPython names first: lines of source up to it are not indented."""
    num_lines: int = 0
    """Lines of IPython's traceback so far."""
    chained: str | None = None
    last: LoggedFailure | None = None
    """The exception of the last one, which a chained one may replace."""


@dataclass(slots=True, kw_only=True)
class _RecentLines:
    """The last lines of a log. Each is searched for its time once, however many exceptions follow it."""

    lines: deque[LogLine] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    num_unsearched: int = 0
    latest: Moment | None = None
    age: int = 0
    """Lines since the one with the latest time."""

    def append(self, line: LogLine) -> None:
        """Add a line."""
        self.lines.append(line)
        self.num_unsearched += 1

    def moment(self) -> Moment | None:
        """Return the time of the last of them that has one; None without one."""
        self.age += self.num_unsearched
        for age, line in enumerate(islice(reversed(self.lines), self.num_unsearched)):
            if (moment := line.moment) is not None:
                self.latest, self.age = moment, age
                break
        self.num_unsearched = 0
        return self.latest if self.age < _KEPT_LINES else None


@dataclass(slots=True, kw_only=True)
class LogReader:
    """Collects the failures in logs, one file after another."""

    found: dict[tuple[str, str], LoggedFailure] = field(default_factory=dict)
    """The first of each kind in each file."""
    num_lines: int = 0
    files: list[str] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)
    taken_down: set[int] = field(default_factory=set)
    """The log's rank, or those that failed."""
    is_one_rank: bool = False
    """True if the logs are of a run of one rank, which has no others to lose or to wait for."""
    waiting: dict[int, Collective] = field(default_factory=dict)
    """By rank, the first collective that timed out."""
    full: str | None = None
    """The first message on a full GPU, whole."""
    ends: list[EvidenceLine] = field(default_factory=list)
    """The last line of each log."""
    failed_otherwise: set[int] = field(default_factory=set)
    """Ranks with a failure that is no consequence of a time-out."""
    timed_out: dict[int, EvidenceLine] = field(default_factory=dict)
    """The line that says so."""

    def read(self, file: IO[bytes], name: str, *, ended_at: Moment | None = None) -> None:
        """Read a log.

        Args:
            name: for display.
            ended_at: its modification time, for lines of a log without timestamps.
        """
        of_path = _RANK_IN_PATH.search(name)
        rank = next((int(group) for group in of_path.groups() if group), None) if of_path else None
        tracebacks: dict[int | None, _Traceback] = {}
        before = _RecentLines()
        self.files.append(name)
        self.ranks |= set() if rank is None else {rank}

        def is_quiet(text: str) -> bool:
            open_ones = (
                traceback for traceback in tracebacks.values() if traceback.has_begun or traceback.is_ignored
            )
            return next(open_ones, None) is None and shows_nothing(text)

        line = None
        for line in read_lines(file, is_quiet=is_quiet):
            before.append(line)
            if is_quiet(line.text):
                continue
            of_line, said = line.rank_and_text
            own = of_line if of_line is not None else rank
            # srun's and pdsh's number is a task's or node's, which a rank that NCCL names is not.
            torch_rank = of_line if f"[rank{of_line}]:" in line.text else None
            self.ranks |= set() if own is None else {own}
            traceback = tracebacks.setdefault(own, _Traceback())
            if self._in_traceback(said, traceback):
                continue
            is_exception = bool(_EXCEPTION.match(said)) or (
                traceback.has_begun and bool(_AFTER_FRAMES.match(said))
            )
            if not is_exception:
                traceback.has_begun = traceback.is_ignored = False
                if _is_no_error(said):
                    continue
            elif traceback.is_ignored:
                traceback.has_begun, traceback.is_ignored, traceback.was_ignored = False, False, True
                continue
            frames = traceback.frames or (_last_frames(before.lines) if is_exception else [])
            failure = failure_of(said, ends_traceback=is_exception, raised_in=_raising(frames))
            if self.is_one_rank and failure is not None and failure.id in _OF_SEVERAL_RANKS:
                failure = None
            if failure is None and is_exception and not said.startswith("SystemExit"):
                failure = _unknown(said, frames)
            if failure is None:
                self._note_watchdog(said, torch_rank)
                continue
            at = EvidenceLine(
                file=name,
                line=line.number,
                text=shown_line(said),
                rank=own,
                moment=before.moment() or ended_at,
            )
            failure = refined(failure, said)
            if failure.id == GPU_IS_FULL and self.full is None:
                self.full = said
            self._note_time_out(said, at, torch_rank)
            if failure.role is Role.ROOT or failure.id in _LOSES_PEER:
                self.failed_otherwise |= {number for number in (torch_rank, rank) if number is not None}
            frame, script = (_frame_shown(frames), script_of(frames)) if is_exception else (None, None)
            self._note(
                LoggedFailure(failure=failure, at=at, frame=frame, script=script), traceback, is_exception
            )
        if line is not None:
            self.num_lines += line.number
            self.ends.append(
                EvidenceLine(file=name, line=line.number, text=shown_line(line.text.strip()), rank=rank)
            )

    def _in_traceback(self, said: str, traceback: _Traceback) -> bool:
        """Follow a traceback; return True for its lines other than the exception."""
        if begin := _TRACEBACK.match(said):
            traceback.named, traceback.num_lines = begin[1], 0
            traceback.is_ignored &= not traceback.has_begun  # the ignored one's traceback was cut
            traceback.was_ignored &= traceback.is_ignored
            traceback.has_begun, traceback.frames = True, []
            return True
        if said.startswith(_ORIGINAL):
            traceback.chained, traceback.has_begun, traceback.frames = _ORIGINAL, True, []
            return True
        if said.startswith((_DURING_HANDLING, _DIRECT_CAUSE)):
            traceback.is_ignored = traceback.was_ignored
            traceback.chained = None if traceback.was_ignored else said
            return True
        if said.startswith(_NEVER_RAISED):
            traceback.has_begun, traceback.is_ignored = False, True
            return True
        if not (traceback.has_begun or traceback.is_ignored):
            return False
        if frame := frame_in(said):
            traceback.frames.append(frame)
            del traceback.frames[:-_MOST_FRAMES]
            return True
        if traceback.frames and not traceback.frames[-1].code:
            traceback.frames[-1] = replace(traceback.frames[-1], code=said.strip()[:LONGEST_SHOWN])
        if traceback.named is not None and not said.startswith(traceback.named):
            traceback.num_lines += 1
            return traceback.num_lines < _KEPT_LINES
        return said.startswith((" ", "\t", "│", "╰", "-->")) or not said

    def _note(self, failure: LoggedFailure, traceback: _Traceback, is_exception: bool) -> None:
        if is_exception:
            # In a chain, the exception raised while another was handled is the one that propagated.
            last, chained = traceback.last, traceback.chained
            traceback.has_begun, traceback.was_ignored = False, False
            traceback.chained, traceback.last = None, failure
            if last is not None and chained and last.failure.role is Role.ROOT and last.failure.is_vague:
                is_direct = chained.startswith(_DIRECT_CAUSE)
                says_less = failure.failure.id == _UNKNOWN or failure.failure.role is Role.CASCADE
                if is_direct and (says_less or last.failure.id != _UNKNOWN):
                    traceback.last = last
                    return
                if self.found.get((last.at.file, last.failure.id)) == last and (
                    is_direct or failure.failure.role is Role.ROOT
                ):
                    del self.found[last.at.file, last.failure.id]
        elif failure.at.text.startswith(_OWN_ERROR) and (last := traceback.last) is not None:
            # zerofit's own name for the exception before it, printed by the same rank.
            if self.found.get((last.at.file, last.failure.id)) == last:
                del self.found[last.at.file, last.failure.id]
            failure = replace(failure, frame=last.frame)
        self.found.setdefault((failure.at.file, failure.failure.id), failure)

    def _note_time_out(self, said: str, at: EvidenceLine, log_rank: int | None) -> None:
        """Note the collective in which a rank waited until its time limit."""
        if (waited := timed_out_rank(said, log_rank=log_rank)) is not None:
            rank, call = waited
            if rank not in self.waiting:
                self.waiting[rank], self.timed_out[rank] = call, at
            elif replace(call, group=None) == self.waiting[rank]:  # said again, with its group
                self.waiting[rank] = call
        self._note_watchdog(said, log_rank)

    def _note_watchdog(self, said: str, log_rank: int | None) -> None:
        """Note what lines beside the time-out say: its process group, and ranks that the watchdog ended."""
        if (taken_down := taken_down_rank(said, log_rank=log_rank)) is not None:
            self.taken_down.add(taken_down)
        if (named := group_of_rank(said, log_rank=log_rank)) is not None:
            rank, number, group = named
            waited = self.waiting.get(rank)
            if waited is not None and waited.number == number and waited.group is None:
                self.waiting[rank] = replace(waited, group=group)

    def explain(self) -> Explanation:
        """Return the cause and the other failures in all logs read."""
        waiting = in_their_groups(self.waiting)
        found = [*self.found.values(), *self._mismatch(waiting)]
        keys = keys_in_time([failure.at for failure in found], files=self.files)
        earliest = sorted(found, key=lambda failure: keys[failure.at.file, failure.at.line])
        cause = _cause_of(earliest)
        kinds: dict[str, LoggedFailure] = {}
        for other in earliest:
            if cause is not None and not _only_confirms(other, cause):
                kinds.setdefault(other.failure.id, other)
        return Explanation(
            cause=self._with_next_command(self._out_of_step(waiting, cause)) if cause is not None else None,
            ends=tuple(end for end in self.ends if not _SOUNDS_DONE.search(end.text)),
            others=tuple(kinds.values())[:_SHOWN_LINES],
            num_lines=self.num_lines,
            files=tuple(self.files),
            waits=tuple(
                waits(waiting, seen=self.ranks, taken_down=self.taken_down, failed=self.failed_otherwise)
            ),
        )

    def _with_next_command(self, cause: LoggedFailure) -> LoggedFailure:
        """Return the cause with the script and the GPUs that the log names in its next command."""
        has_launcher = any(failure_id == _RANK_FAILED for _, failure_id in self.found)
        text = cause.at.text if self.full is None else self.full
        failure = completed(
            cause.failure, text, script=cause.script, ranks=self.ranks, has_launcher=has_launcher
        )
        return replace(cause, failure=failure)

    def _mismatch(self, waiting: Mapping[int, Collective]) -> Iterator[LoggedFailure]:
        """Yield the failure of a rank that waits in another collective than the others."""
        if (mismatch := mismatch_in(waiting)) is not None:
            at = self.timed_out[mismatch.odd_ranks[0]]
            failure = replace(failures()["collective-mismatch"], vague=mismatch.is_guessed)
            yield LoggedFailure(failure=failure, at=at)

    def _out_of_step(self, waiting: Mapping[int, Collective], cause: LoggedFailure) -> LoggedFailure:
        """Return a time-out as that of the rank that is behind the others, or alone ahead of them."""
        apart = sorted(out_of_step(waiting), key=lambda found: not found.is_behind)
        if cause.failure.id != _TIMED_OUT or not apart:
            return cause
        rank, where = apart[0].ranks[0], "behind" if apart[0].is_behind else "ahead of"
        failure = replace(
            cause.failure,
            cause=f"the ranks waited for one that is {where} them, until the time limit of a collective",
            why=apart[0].sentence,
            fix=f"see what {apart[0].words} did in place of that collective, by log or stack (zerofit "
            "launch writes all stacks of a hang): a call on some ranks only, an uneven batch, or a slow "
            "step, which needs InitProcessGroupKwargs(timeout=...)",
        )
        return LoggedFailure(failure=failure, at=replace(self.timed_out[rank], rank=rank), names_ranks=True)


def _cause_of(earliest: Sequence[LoggedFailure]) -> LoggedFailure | None:
    """Return the earliest root, the clear ones first, or what says most if there is none.

    A run that hangs, or lost a rank, is ended by the scheduler's limit hours later: what came first counts.
    """

    def says_most(failure: LoggedFailure) -> tuple[int, bool]:
        rank_of_role = (Role.ROOT, Role.CONFIRMATION, Role.CASCADE).index(failure.failure.role)
        return rank_of_role, failure.failure.is_vague

    cause = min(earliest, key=says_most, default=None)
    if cause is None:
        return None
    before = earliest[: earliest.index(cause)]
    return min((failure for failure in before if _led_to(failure, cause)), key=says_most, default=cause)


def _led_to(failure: LoggedFailure, cause: LoggedFailure) -> bool:
    """Return True if an earlier failure is the cause of another one."""
    if cause.failure.id in failure.failure.explains:
        return True
    # A failure after which the log says nothing more: one that the script handled has more lines after it.
    return (
        cause.failure.id.startswith(_TIME_LIMIT)
        and failure.failure.role is not Role.CONFIRMATION
        and failure.at.file == cause.at.file
        and cause.at.line - failure.at.line <= _KEPT_LINES
    )


def _only_confirms(other: LoggedFailure, cause: LoggedFailure) -> bool:
    """Return True for what says no more than the cause: a signal that ended the run, a launcher's word."""
    is_signal = other.failure.role is Role.CONFIRMATION and other.failure.id in cause.failure.explains
    is_word = other.failure.id == _RANK_FAILED and cause.failure.role is Role.ROOT
    return other.failure.id == cause.failure.id or is_signal or is_word


def _is_no_error(said: str) -> bool:
    """Return True for a message that its program does not treat as an error."""
    if any(part in said for part in _NAMES_A_CAUSE):
        return False
    if "NCCL INFO " in said:
        return "retrying" not in said
    # The Hub's client looks into its cache then.
    return bool(_NO_ERROR.match(said)) or "thrown while requesting" in said


def _raising(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Return the innermost frame, and the one that called it if it is of Python's standard library."""
    raising = [frame for frame in frames if frame.function != _PASSED_ON]
    callers = (frame for frame in reversed(raising) if frame.package != PYTHON)
    return tuple(dict.fromkeys([*raising[-1:], *islice(callers, 1)]))


def _frame_shown(frames: Sequence[Frame]) -> str | None:
    """Return the innermost frame of the user's own code, or else of all, as file:line."""
    own = next((frame for frame in reversed(frames) if frame.module is None), None)
    shown = own or next(reversed(frames), None)
    return None if shown is None else shown.place


def _last_frames(before: deque[LogLine]) -> list[Frame]:
    """Return the frame just before the last line's exception, of the same rank."""
    read = (earlier.rank_and_text for earlier in reversed(before))
    rank, after = next(read)
    for said in islice((said for of_line, said in read if of_line == rank), _FRAME_AWAY - 1):
        if frame := frame_in(said):
            return [replace(frame, code=after.strip()[:LONGEST_SHOWN])]
        after = said
    return []


def _unknown(said: str, frames: Sequence[Frame]) -> KnownFailure:
    """Return a failure for an exception that is not in the catalog, in the words of who raised it."""
    name = said.partition(":")[0].rpartition(".")[2]
    raised = next(reversed(_raising(frames)), None)
    package = None if raised is None else raised.package
    if raised is None or package is None or package == PYTHON:
        who, why = (
            "the script",
            "not a known failure of libraries, GPUs or schedulers: most likely the script or its data",
        )
        fix = "read the lines before it in the log, from the first Traceback on"
    elif raised.reads_data:
        who, why = (
            package,
            f"not a known failure: {raised.module} could not handle the data that it was given",
        )
        fix = "print the sample, or the file, that it read: the lines before it in the log may name it"
    elif _TELLS_WHAT_TO_DO.search(said):
        who, why = (
            package,
            f"not a known failure: {raised.module} refuses it, and its message says what it takes",
        )
        fix = "do what the message says"
    else:
        own = next((frame.place for frame in reversed(frames) if frame.module is None), "the script")
        who = package
        why = (
            f"not a known failure: {raised.module}, which {own} called, raised it: an argument or setting "
            "that it can't handle, or versions of libraries that do not fit each other"
        )
        fix = f"pip show {package}; search its issues for the message, and try another release of it"
    return KnownFailure(
        id=_UNKNOWN,
        role=Role.ROOT,
        cause=f"{who} raised {name}",
        why=why,
        fix=fix,
        evidence="the exception itself",
        signs=(),
        ends_traceback=True,
    )


def explain_logs(
    paths: Sequence[Path], *, root: Path | None = None, is_one_rank: bool = False
) -> Explanation:
    """Return why a run failed, from its logs.

    Args:
        root: folder that log names are shown relative to; None shows them unchanged.
        is_one_rank: True if the run is known to have had one rank.
    """
    reader = LogReader(is_one_rank=is_one_rank)
    for path in paths:
        with open_stream(path) as file:
            written_at = time.localtime(os.fstat(file.fileno()).st_mtime)
            name = str(path.relative_to(root) if root else path)
            reader.read(file, name, ended_at=(*written_at[1:6], 0))
    return reader.explain()


def explain_bytes(file: IO[bytes], name: str) -> Explanation:
    """Return why a run failed, from a log in an open file, such as standard input."""
    reader = LogReader()
    reader.read(file, name)
    return reader.explain()


def logs_in(folder: Path, *, or_none: bool = False) -> tuple[Path, ...]:
    """Return the logs in a folder and below, sorted by name.

    Raises:
        UserError: there is none, and `or_none` is False.
    """
    found = sorted(path for path in _files_in(folder) if _LOG_NAMES.search(path.name))
    if not found and not or_none:
        raise UserError(
            "no-logs",
            "there are no logs to explain",
            found=str(folder),
            why="no file in it or below is named as a log: *.log, *.out, *.err, *.txt",
            fix="name the file itself: zerofit explain FILE",
        )
    return tuple(found[:_MOST_FILES])


def _files_in(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [inner for inner in folders if not inner.startswith(".")]
        for name in names:
            path = Path(parent, name)
            with contextlib.suppress(OSError):
                if stat.S_ISREG(path.stat().st_mode) and os.access(path, os.R_OK):
                    yield path
