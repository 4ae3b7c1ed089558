"""From how each rank ended to the one that ended the run, an exit code and a sentence."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerofit.core.rank_record import RankRecord

_PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Gloo",
    "NCCL",
    "TCPStore",
)
"""Texts of the errors that a rank raises because another one has gone: never the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """How a rank failed, as the launcher saw it."""

    exit_code: int
    """Negative for a signal."""
    timestamp: int
    """When the launcher saw it, in whole seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a run ended."""

    exit_code: int
    """For zerofit to exit with: the script's own, or 128 + the signal's number."""
    cause: str | None
    """One sentence; None where all went well."""


def judge(
    *,
    launcher_code: int,
    stopped_by: signal.Signals | None,
    failures: Mapping[int, RankFailure],
    records: Mapping[int, RankRecord],
    oom_kills: int | None,
) -> RunEnd:
    """Return the run's exit code and cause.

    Args:
        launcher_code: exit code of the launch command, negative for a signal.
        oom_kills: processes that the kernel killed for want of memory meanwhile; None where unknown.
    """
    if stopped_by is not None:
        return RunEnd(exit_code=128 + stopped_by, cause=f"stopped by {stopped_by.name}")
    if launcher_code == 0:
        return RunEnd(exit_code=0, cause=None)
    if not failures:
        return _launcher_failed(launcher_code)

    def cause_first(rank: int) -> tuple[int, int, int]:
        failure = failures[rank]
        return _likely_consequence(failure.exit_code, records.get(rank)), failure.timestamp, rank

    rank = min(failures, key=cause_first)
    code = failures[rank].exit_code
    if code < 0:
        return RunEnd(exit_code=128 - code, cause=_killed(rank, -code, oom_kills))
    record = records.get(rank)
    return RunEnd(exit_code=code, cause=f"rank {rank} exited with {code}{_error_said(record)}")


def _error_said(record: RankRecord | None) -> str:
    """Return a rank's error in a few words: of zerofit's own errors the headline, of others the type."""
    if record is None or record.error_type in (None, "SystemExit"):
        return ""
    if record.error_type == UserError.__name__ and record.error_message:
        return f": {record.error_message.splitlines()[0]}"
    return f": {record.error_type}"


def _likely_consequence(code: int, record: RankRecord | None) -> int:
    """Rank failures by how likely they are a consequence of another's: 0 is a cause of its own."""
    if code == -signal.SIGTERM:
        return 3
    if record is not None and record.error_message and any(t in record.error_message for t in _PEER_LOST):
        return 2
    return 0 if code < 0 or record is not None else 1


def _killed(rank: int, number: int, oom_kills: int | None) -> str:
    text = f"rank {rank} was killed by {_signal_name(number)}"
    if number != signal.SIGKILL or oom_kills is None:
        return text
    if oom_kills:
        return f"{text}: probably because the host ran out of memory"
    return f"{text}; the kernel's out-of-memory counter has not moved, so somebody else sent it"


def _launcher_failed(code: int) -> RunEnd:
    if code < 0:
        return RunEnd(exit_code=128 - code, cause=f"accelerate launch was killed by {_signal_name(-code)}")
    return RunEnd(exit_code=code, cause="accelerate launch failed before it started the script")


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:  # real-time signals have no names
        return f"signal {number}"
