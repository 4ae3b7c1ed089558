"""From how each rank ended to the rank that ended the run, an exit code and a sentence."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any

import pytest

from zerofit.core.rank_record import RankRecord
from zerofit.launching.diagnose import RankFailure, judge

_TERM, _KILL, _SEGV = -signal.SIGTERM, -signal.SIGKILL, -signal.SIGSEGV


def _record(rank: int, *, error: str, message: str, code: int = 1) -> RankRecord:
    return RankRecord(
        rank=rank,
        exit_code=code,
        error_type=error,
        error_message=message,
        peak_host_bytes=0,
        peak_gpu_allocated_bytes=None,
        peak_gpu_reserved_bytes=None,
        changes=(),
    )


def _peer_lost(rank: int) -> RankRecord:
    return _record(rank, error="RuntimeError", message="[gloo] Connection closed by peer [127.0.0.1]:4242")


@dataclass(frozen=True, slots=True)
class _Case:
    exit_codes: dict[int, int]
    records: tuple[RankRecord, ...] = ()
    launcher_code: int = 1
    stopped_by: signal.Signals | None = None
    oom_kills: int | None = None
    seen_at: dict[int, int] = field(default_factory=dict)
    """When a rank's failure was seen; all at once where this says nothing."""


_KILLED_1 = "rank 1 was killed by signal 9 (SIGKILL)"
_EXITS_7: dict[str, Any] = {"error": "SystemExit", "message": "7", "code": 7}

CASES = {
    "all well": (_Case({}, launcher_code=0), 0, None),
    "the script exits 7": (_Case({0: 7}, (_record(0, **_EXITS_7),)), 7, "rank 0 exited with 7"),
    "os._exit leaves no record": (_Case({0: 7}), 7, "rank 0 exited with 7"),
    "an exception": (
        _Case({0: 1}, (_record(0, error="ValueError", message="x"),)),
        1,
        "rank 0 exited with 1: ValueError",
    ),
    "an error of zerofit's own": (
        _Case({0: 2, 1: _TERM}, (_record(0, error="UserError", message="error[x]: y\n  found: z", code=2),)),
        2,
        "rank 0 exited with 2: error[x]: y",
    ),
    "killed, no counter": (_Case({1: _KILL}), 137, _KILLED_1),
    "killed by the kernel": (
        _Case({1: _KILL}, oom_kills=1),
        137,
        f"{_KILLED_1}: probably because the host ran out of memory",
    ),
    "killed by somebody": (
        _Case({1: _KILL}, oom_kills=0),
        137,
        f"{_KILLED_1}; the kernel's out-of-memory counter has not moved, so somebody else sent it",
    ),
    "a crash is no want of memory": (
        _Case({0: _SEGV}, oom_kills=1),
        139,
        "rank 0 was killed by signal 11 (SIGSEGV)",
    ),
    "a real-time signal": (_Case({0: -35}), 163, "rank 0 was killed by signal 35"),
    "the others are stopped by the launcher": (
        _Case({0: _TERM, 1: 7}, (_record(1, **_EXITS_7),)),
        7,
        "rank 1 exited with 7",
    ),
    "a lost connection is a consequence": (_Case({0: 1, 1: _KILL}, (_peer_lost(0),)), 137, _KILLED_1),
    "an error of its own before a lost connection": (
        _Case({0: 1, 1: 1}, (_peer_lost(0), _record(1, error="OutOfMemoryError", message="CUDA"))),
        1,
        "rank 1 ran out of GPU memory",
    ),
    "all lost one another: the first": (
        _Case({0: 1, 1: 1}, (_peer_lost(0), _peer_lost(1))),
        1,
        "rank 0 exited with 1: RuntimeError",
    ),
    "of two equals the one that failed first": (
        _Case({0: _KILL, 1: _SEGV}, seen_at={0: 1002, 1: 1001}),
        139,
        "rank 1 was killed by signal 11 (SIGSEGV)",
    ),
    "a lost connection is a consequence even where it is seen first": (
        _Case({0: 1, 1: _KILL}, (_peer_lost(0),), seen_at={0: 1001, 1: 1002}),
        137,
        _KILLED_1,
    ),
    "a rank with a record before one without": (
        _Case({0: 3, 1: 1}, (_record(1, error="KeyError", message="'a'"),)),
        1,
        "rank 1 exited with 1: KeyError",
    ),
    "somebody stopped the ranks": (
        _Case({0: _TERM, 1: _TERM}),
        143,
        "rank 0 was killed by signal 15 (SIGTERM)",
    ),
    "the launcher itself": (_Case({}), 1, "accelerate launch failed before it started the script"),
    "launcher killed": (
        _Case({}, launcher_code=_KILL),
        137,
        "accelerate launch was killed by signal 9 (SIGKILL)",
    ),
    "we were told to stop": (_Case({0: _TERM}, stopped_by=signal.SIGTERM), 143, "stopped by SIGTERM"),
    "Ctrl-C": (_Case({}, stopped_by=signal.SIGINT, launcher_code=130), 130, "stopped by SIGINT"),
}


@pytest.mark.parametrize(("case", "exit_code", "cause"), CASES.values(), ids=CASES)
def test_verdict(case: _Case, exit_code: int, cause: str | None) -> None:
    verdict = judge(
        launcher_code=case.launcher_code,
        stopped_by=case.stopped_by,
        failures={
            rank: RankFailure(exit_code=code, timestamp=case.seen_at.get(rank, 0))
            for rank, code in case.exit_codes.items()
        },
        records={record.rank: record for record in case.records},
        oom_kills=case.oom_kills,
        observations={},
        num_ranks=2,
    )
    assert (verdict.exit_code, verdict.cause) == (exit_code, cause)
