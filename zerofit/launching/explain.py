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

from zerofit.core.errors import UserError
from zerofit.core.secrets import masked_text
from zerofit.launching.failures import KnownFailure, Role, failure_of, shows_nothing
from zerofit.launching.log_lines import read_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zerofit.launching.log_lines import LogLine, Moment

_LOG_NAMES = re.compile(
    r"(?i)(\.(log|out|err|txt|stdout|stderr|output)(\.\d+)?|[.-][oe]\d+|stdout|stderr|std_(out|err)|log)$"
)
_MOST_FILES = 1000
_RANK_IN_PATH = re.compile(r"rank[_-]?(\d+)\.\w+$|(?:^|[/.-])(\d+)/(?:stdout|stderr)(?:\.log)?$")
"""rank3.log; 3/stderr.log of torchrun --log-dir."""
_EXCEPTION = re.compile(r"(?!\w*Warning)[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Timeout)\b(?:: |:?$)")
_AFTER_FRAMES = re.compile(r"[A-Za-z_][\w.]*(: |:?$)")
_FRAME = re.compile(r'\s+File "([^"]+)", line (\d+)')
_LIBRARY = re.compile(r"(?:site|dist)-packages|/lib(?:64)?/python3|^<")
_FRAME_AWAY = 6
"""Lines from a frame to the exception where there is no "Traceback": a SyntaxError, a cut log. ASSUMPTION."""
_NO_ERROR = re.compile(
    r"(?!.*(?:death signal|received SIG|KeyboardInterrupt|CUDA initialization|Name or service|errno: 98"
    r"|_dynamo\.exc))(?:"
    r"\W*+(?:[\w.]*\w\W++)?(?:DEBUG|INFO|WARNING)\b"
    r"|\W*[IW](?:\d{3,4} \d| [\w./]+:\d+\])"
    r'|\{(?:(?!"level":).)*"level": ?"(?i:debug|info|warn)'
    r"|\S+:\d+: \w*Warning: "
    r"|.*?NCCL INFO (?!.*retrying)|.*thrown while requesting)"
)
"""A message that its program does not treat as an error: of logging, glog, JSON, Python's warnings, NCCL, or
the Hub's client, which then looks into its cache. The first part lists those that name a cause."""
_NEVER_RAISED = (
    "Exception ignored in",
    "--- Logging error ---",
    "Error in atexit._run_exitfuncs",
)
"""Python prints these exceptions and goes on."""
_TIMED_OUT = re.compile(
    r"\[(?:PG (.*) )?Rank (\d+)\].*aught collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+)"
)
"""NCCL's watchdog on the collective that a rank waits in. Source:
torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (torch 2.1 to 2.13)."""
_OWN_ERROR = "error["
_DURING_HANDLING = "During handling of the above exception, another exception occurred"
_DIRECT_CAUSE = "The above exception was the direct cause of the following exception"
_KEPT_LINES = 200
"""Lines searched back for a timestamp. ASSUMPTION: no traceback is longer."""
_SHOWN_LINES = 3
_UNKNOWN = "unknown-exception"
_LONGEST_SHOWN = 240


class CauseConfidence(enum.StrEnum):
    """How certain a cause is."""

    HIGH = "high"
    """The log shows a known root cause."""
    MEDIUM = "medium"
    """A message with many possible reasons, or an unknown exception."""
    LOW = "low"
    """The log only shows consequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceLine:
    """A line of a log that shows a failure."""

    file: str
    line: int
    text: str
    """With secrets masked."""
    rank: int | None
    moment: Moment | None = None
    """Its time; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedFailure:
    """A failure found in a log."""

    failure: KnownFailure
    at: EvidenceLine
    frame: str | None = None
    """The innermost frame of its traceback outside libraries, or else within, as file:line."""

    @property
    def confidence(self) -> CauseConfidence:
        """How certain it is that this is the cause."""
        if self.failure.role is not Role.ROOT:
            return CauseConfidence.LOW
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
    frame: str | None = None
    chained: str | None = None
    last: LoggedFailure | None = None
    """The exception of the last one, which a chained one may replace."""


@dataclass(slots=True, kw_only=True)
class LogReader:
    """Collects the failures in logs, one file after another."""

    found: dict[tuple[str, str], LoggedFailure] = field(default_factory=dict)
    """The first of each kind in each file."""
    num_lines: int = 0
    files: list[str] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)
    """The log's rank, or those that failed."""
    waiting: dict[int, tuple[str | None, int, str]] = field(default_factory=dict)
    """By rank, the first collective that timed out: process group, number and kind."""

    def read(self, file: IO[bytes], name: str, *, ended_at: Moment | None = None) -> None:
        """Read a log.

        Args:
            name: for display.
            ended_at: its modification time, for lines of a log without timestamps.
        """
        of_path = _RANK_IN_PATH.search(name)
        rank = next((int(group) for group in of_path.groups() if group), None) if of_path else None
        tracebacks: dict[int | None, _Traceback] = {}
        before: deque[LogLine] = deque(maxlen=_KEPT_LINES)
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
            if waited := _TIMED_OUT.search(said):
                self.waiting.setdefault(int(waited[2]), (waited[1], int(waited[3]), waited[4]))
            self.ranks |= set() if own is None else {own}
            traceback = tracebacks.setdefault(own, _Traceback())
            if self._in_traceback(said, traceback):
                continue
            is_exception = bool(_EXCEPTION.match(said)) or (
                traceback.has_begun and bool(_AFTER_FRAMES.match(said))
            )
            if not is_exception:
                traceback.has_begun = traceback.is_ignored = False
                if _NO_ERROR.match(said):
                    continue
            elif traceback.is_ignored:
                traceback.has_begun, traceback.is_ignored, traceback.was_ignored = False, False, True
                continue
            failure = failure_of(said, ends_traceback=is_exception)
            if failure is None and is_exception and not said.startswith("SystemExit"):
                failure = _unknown(said)
            if failure is None:
                continue
            at = EvidenceLine(
                file=name,
                line=line.number,
                text=masked_text(said)[:_LONGEST_SHOWN],
                rank=own,
                moment=next((m for earlier in reversed(before) if (m := earlier.moment)), ended_at),
            )
            frame = traceback.frame or (_last_frame(before) if is_exception else None)
            self._note(LoggedFailure(failure=failure, at=at, frame=frame), traceback, is_exception)
        self.num_lines += 0 if line is None else line.number

    def _in_traceback(self, said: str, traceback: _Traceback) -> bool:
        """Follow a traceback; return True for its lines other than the exception."""
        if said.startswith("Traceback (most recent call last)"):
            traceback.is_ignored &= not traceback.has_begun  # the ignored one's traceback was cut
            traceback.was_ignored &= traceback.is_ignored
            traceback.has_begun, traceback.frame = True, None
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
        if (frame := _FRAME.match(said)) and not _LIBRARY.search(frame[1]):
            traceback.frame = f"{frame[1]}:{frame[2]}"
        return said.startswith((" ", "\t")) or not said

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

    def explain(self) -> Explanation:
        """Return the cause and the other failures in all logs read."""
        order = {name: number for number, name in enumerate(self.files)}

        def cause_first(failure: LoggedFailure) -> tuple[int, int]:
            rank_of_role = (Role.ROOT, Role.CONFIRMATION, Role.CASCADE).index(failure.failure.role)
            return rank_of_role, failure.failure.is_vague

        def earliest(failure: LoggedFailure) -> tuple[bool, object, int, int]:
            moment = failure.at.moment if len(self.files) > 1 else None  # within a log, lines are in order
            return moment is None, moment or (), order[failure.at.file], failure.at.line

        found = sorted(self.found.values(), key=lambda cause: (cause_first(cause), earliest(cause)))
        kinds: dict[str, LoggedFailure] = {}
        for other in found[1:]:
            if other.failure.id != found[0].failure.id:
                kinds.setdefault(other.failure.id, other)
        return Explanation(
            cause=found[0] if found else None,
            others=tuple(sorted(kinds.values(), key=earliest))[:_SHOWN_LINES],
            num_lines=self.num_lines,
            files=tuple(self.files),
            waits=tuple(self._waits()),
        )

    def _waits(self) -> Iterator[str]:
        """Yield a sentence for each rank that did not reach the collective in which others timed out."""
        if (
            len({group for group, _, _ in self.waiting.values()}) != 1
        ):  # numbers of different groups can't be compared
            return
        at = {rank: (number, kind) for rank, (_, number, kind) in self.waiting.items()}
        last = max(at.values())
        at_last = sorted(rank for rank in at if at[rank] == last)
        those = f"rank{'' if len(at_last) == 1 else 's'} {', '.join(map(str, at_last))} waited"
        for rank in sorted({*self.ranks, *range(max(at) + 1)} - {*at_last}):
            own = f"waited in number {at[rank][0]}, {at[rank][1]}" if rank in at else "timed out in none"
            yield f"rank {rank} never reached collective number {last[0]}, {last[1]}, where {those}: it {own}"


def _last_frame(before: deque[LogLine]) -> str | None:
    """Return the frame just before the last line's exception, of the same rank, as file:line."""
    read = (earlier.rank_and_text for earlier in reversed(before))
    rank, _ = next(read)
    last = islice((said for of_line, said in read if of_line == rank), _FRAME_AWAY - 1)
    return next((f"{frame[1]}:{frame[2]}" for said in last if (frame := _FRAME.match(said))), None)


def _unknown(said: str) -> KnownFailure:
    """Return a failure for an exception that is not in the catalog."""
    return KnownFailure(
        id=_UNKNOWN,
        role=Role.ROOT,
        cause=f"the script raised {said.partition(':')[0].rpartition('.')[2]}",
        why="not a known failure of libraries, GPUs or schedulers: most likely the script or its data",
        fix="read the lines before it in the log, from the first Traceback on",
        evidence="the exception itself",
        signs=(),
        ends_traceback=True,
    )


def explain_logs(paths: Sequence[Path], *, root: Path | None = None) -> Explanation:
    """Return why a run failed, from its logs.

    Args:
        root: folder that log names are shown relative to; None shows them unchanged.
    """
    reader = LogReader()
    for path in paths:
        with open(path, "rb") as file:
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
