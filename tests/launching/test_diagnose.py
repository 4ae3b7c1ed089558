"""From how each rank ended to the rank that ended the run, an exit code and a sentence."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any

import pytest
from small_runs import observation

from zerofit.core.rank_observation import Phase, RankObservation
from zerofit.core.rank_record import RankRecord
from zerofit.core.units import GIB
from zerofit.launching.diagnose import EndKind, FullGpu, Hang, RankFailure, RunEnd, full_gpu, judge

_TERM, _KILL, _SEGV = -signal.SIGTERM, -signal.SIGKILL, -signal.SIGSEGV


def _record(
    rank: int, *, error: str | None = None, message: str | None = None, code: int = 1, ended_at: float = 0
) -> RankRecord:
    return RankRecord(
        rank=rank,
        exit_code=code,
        error_type=error,
        error_message=message,
        peak_host_bytes=0,
        peak_gpu_allocated_bytes=None,
        peak_gpu_reserved_bytes=None,
        changes=(),
        ended_at=ended_at,
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
    host_limit_bytes: int | None = None
    observations: tuple[RankObservation, ...] = ()
    is_one_of_nodes: bool = False
    kind: EndKind | None = None
    """Not looked at where this says nothing."""
    seen_at: dict[int, int] = field(default_factory=dict)
    """When a rank's failure was seen; all at once where this says nothing."""
    by_launcher: dict[int, bool] = field(default_factory=dict)
    """Whether the launcher's own signal ended a rank; unknown where this says nothing."""
    hang: Hang | None = None


_KILLED_1 = "rank 1 was killed by signal 9 (SIGKILL)"
_AGENT_HANGS = Hang(rank=None, phase=None, sentence="hang: accelerate launch")
_EXITS_7: dict[str, Any] = {"error": "SystemExit", "message": "7", "code": 7}

CASES = {
    "the one that ended first, by its own clock": (
        _Case(
            {0: 1, 1: 1},
            (
                _record(0, error="KeyError", message="'a'", ended_at=7.9),
                _record(1, error="ValueError", message="x", ended_at=7.2),
            ),
            kind=EndKind.SCRIPT_ERROR,
        ),
        1,
        "rank 1 exited with 1: ValueError",
    ),
    "a rank that left with 0": (
        _Case(
            {0: 1},
            (_peer_lost(0), _record(1, code=0, ended_at=3)),
            observations=(observation(Phase.BACKWARD, step=9), observation(Phase.ENDED, step=8)),
            kind=EndKind.SCRIPT_ERROR,
        ),
        1,
        "rank 1 ended with exit code 0 after 8 steps, and rank 0, still training, lost its connection to it",
    ),
    "another node": (
        _Case({0: 1, 1: 1}, (_peer_lost(0), _peer_lost(1)), is_one_of_nodes=True, kind=EndKind.LOST_NODE),
        1,
        "rank 0 exited with 1: RuntimeError: the ranks of this node lost their peers, so the cause is on "
        "another node",
    ),
    "NCCL that finds no room for its buffers, and the rank that lost it": (
        _Case(
            {0: 1, 1: 1},
            (
                _peer_lost(0),
                _record(1, error="DistBackendError", message="NCCL error: Cuda failure 2 'out of memory'"),
            ),
            kind=EndKind.GPU_OUT_OF_MEMORY,
        ),
        1,
        "rank 1 ran out of GPU memory",
    ),
    "the watchdog of NCCL after another's error": (
        _Case({0: -signal.SIGABRT, 1: 1}, (_record(1, error="KeyError", message="'a'", ended_at=9),)),
        1,
        "rank 1 exited with 1: KeyError",
    ),
    "full host memory, as torch says": (
        _Case(
            {0: 1},
            (_record(0, error="RuntimeError", message="DefaultCPUAllocator: can't allocate memory: you"),),
            observations=(observation(Phase.FORWARD, step=0),),
            kind=EndKind.HOST_OUT_OF_MEMORY,
        ),
        1,
        "rank 0 ran out of host memory, in forward of step 1",
    ),
    "the launcher died after the ranks had ended well": (
        _Case({}, (_record(0, code=0), _record(1, code=0))),
        0,
        None,
    ),
    "the launcher died, and a rank tells": (
        _Case({}, (_record(0, error="ValueError", message="x"),), kind=EndKind.SCRIPT_ERROR),
        1,
        "rank 0 exited with 1: ValueError",
    ),
    "the launcher died in the training": (
        _Case({}, observations=(observation(Phase.FORWARD, step=3),), kind=EndKind.LAUNCHER),
        1,
        "accelerate launch failed during training, without reporting how the ranks ended",
    ),
    "the launcher killed for want of memory": (
        _Case({}, launcher_code=_KILL, oom_kills=1, kind=EndKind.HOST_OUT_OF_MEMORY),
        137,
        "accelerate launch ran out of host memory, and the kernel killed it",
    ),
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
        _Case({1: _KILL}, oom_kills=1, kind=EndKind.HOST_OUT_OF_MEMORY),
        137,
        "rank 1 ran out of host memory, and the kernel killed it",
    ),
    "killed by the kernel, in a cgroup with a limit": (
        _Case(
            {0: _KILL},
            observations=(observation(Phase.BACKWARD, step=4),),
            oom_kills=1,
            host_limit_bytes=3 * GIB // 2,
            kind=EndKind.HOST_OUT_OF_MEMORY,
        ),
        137,
        "rank 0 ran out of host memory, in backward of step 5, and the kernel killed it; the limit of its "
        "cgroup is 1.5 GiB",
    ),
    "killed by somebody": (
        _Case({1: _KILL}, oom_kills=0),
        137,
        f"{_KILLED_1}; the kernel's out-of-memory counter has not moved, so someone else sent it",
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
    "a rank that left without a record": (
        _Case(
            {0: 1, 1: 0},
            (_peer_lost(0),),
            observations=(observation(Phase.BACKWARD, step=9), observation(Phase.FORWARD, step=8)),
            kind=EndKind.SCRIPT_ERROR,
        ),
        1,
        "rank 1 ended with exit code 0 after 8 steps without a record, as by os._exit(0), and rank 0, still "
        "training, lost its connection to it",
    ),
    "an error of its own, after a rank had left without a record": (
        _Case({0: 1, 1: 0}, (_record(0, error="KeyError", message="'a'"),)),
        1,
        "rank 0 exited with 1: KeyError",
    ),
    "SIGTERM from outside before the error of the one that lost it": (
        _Case({0: 1, 1: _TERM}, (_peer_lost(0),), by_launcher={0: False, 1: False}, kind=EndKind.SIGNAL),
        143,
        "rank 1 was killed by signal 15 (SIGTERM)",
    ),
    "SIGTERM from outside before the launcher's own": (
        _Case({0: _TERM, 1: _TERM}, by_launcher={0: True, 1: False}),
        143,
        "rank 1 was killed by signal 15 (SIGTERM)",
    ),
    "the launcher's SIGKILL, 30 s after an error": (
        _Case({0: _KILL, 1: 7}, by_launcher={0: True, 1: False}, seen_at={0: 0, 1: 1}),
        7,
        "rank 1 exited with 7",
    ),
    "the launcher's SIGTERM on a node that lost its peers": (
        _Case(
            {0: 1, 1: _TERM},
            (_peer_lost(0),),
            by_launcher={0: False, 1: True},
            is_one_of_nodes=True,
            kind=EndKind.LOST_NODE,
        ),
        1,
        "rank 0 exited with 1: RuntimeError: the ranks of this node lost their peers, so the cause is on "
        "another node",
    ),
    "a crash before the error of the one that lost it": (
        _Case({0: 1, 1: _SEGV}, (_peer_lost(0),), by_launcher={0: False, 1: False}),
        139,
        "rank 1 was killed by signal 11 (SIGSEGV)",
    ),
    "a launcher that did not end after ranks that did well": (
        _Case({0: _TERM}, (_record(0, code=0), _record(1, code=0)), launcher_code=143, hang=_AGENT_HANGS),
        0,
        None,
    ),
    "a launcher that did not end after a rank that failed": (
        _Case(
            {0: _TERM},
            (_record(0, code=0), _record(1, error="KeyError", message="'a'")),
            launcher_code=143,
            hang=_AGENT_HANGS,
        ),
        1,
        "rank 1 exited with 1: KeyError",
    ),
    "a launcher that did not end, and ranks that left no record": (
        _Case({}, (_record(0, code=0),), launcher_code=_KILL, hang=_AGENT_HANGS, kind=EndKind.HANG),
        1,
        "hang: accelerate launch",
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
            rank: RankFailure(
                exit_code=code,
                timestamp=case.seen_at.get(rank, 0),
                by_launcher=case.by_launcher.get(rank),
            )
            for rank, code in case.exit_codes.items()
        },
        records={record.rank: record for record in case.records},
        oom_kills=case.oom_kills,
        observations=dict(enumerate(case.observations)),
        num_ranks=2,
        host_limit_bytes=case.host_limit_bytes,
        is_one_of_nodes=case.is_one_of_nodes,
        hang=case.hang,
    )
    assert (verdict.exit_code, verdict.cause) == (exit_code, cause)
    assert case.kind in (None, verdict.kind)
    assert (verdict.kind is None) == (cause is None)


# c10/cuda/CUDACachingAllocator.cpp makes these of torch 2.13.
_OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 512.00 "
    "MiB is free. Including non-PyTorch memory, this process has 78.59 GiB memory in use. {allowed}Of the "
    "allocated memory 70.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated."
)


_LIMITED = (  # as torch 2.13 wrote it on an H200, after set_per_process_memory_fraction(0.12)
    "CUDA out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which "
    "122.08 GiB is free. Including non-PyTorch memory, this process has 17.20 GiB memory in use. 16.78 GiB "
    "allowed; Of the allocated memory 16.54 GiB is allocated by PyTorch, and 150.00 KiB is reserved by "
    "PyTorch but unallocated."
)
_SHARED = _OUT_OF_MEMORY.format(allowed="").replace(
    "Including", "Process 1183 has 8.19 GiB memory in use. Process 7 has 512.00 MiB memory in use. Including"
)


def _gib(size: float) -> int:
    return round(size * GIB)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            _OUT_OF_MEMORY.format(allowed=""),
            FullGpu(missing_bytes=_gib(1.5), peak_bytes=_gib(72), available_bytes=_gib(71.5)),
        ),
        (
            _LIMITED,
            FullGpu(
                missing_bytes=_gib(0.25) - _gib(16.78) + _gib(16.54) + 150 * 1024,
                peak_bytes=_gib(16.54) + _gib(0.25),
                available_bytes=_gib(16.78),
                allowed_bytes=_gib(16.78),
            ),
        ),
        (
            _SHARED,
            FullGpu(
                missing_bytes=_gib(1.5),
                peak_bytes=_gib(72),
                available_bytes=_gib(71.5),
                others_bytes=_gib(8.19) + _gib(0.5),
            ),
        ),
        (  # fragments
            _OUT_OF_MEMORY.format(allowed="").replace("2.00 GiB", "20.00 MiB"),
            FullGpu(missing_bytes=0, peak_bytes=_gib(70 + 20 / 1024), available_bytes=_gib(71.5)),
        ),
        ("CUDA error: out of memory", FullGpu()),
    ],
)
def test_a_failed_allocation_is_parsed_from_torchs_message(text: str, expected: FullGpu) -> None:
    assert full_gpu(text) == expected


@pytest.mark.parametrize(
    ("message", "words", "missing_bytes", "peak_bytes", "available_bytes"),
    [
        (
            _OUT_OF_MEMORY.format(allowed=""),
            "1.5 GiB more than free, 72.0 GiB in total",
            _gib(1.5),
            72 * GIB,
            _gib(71.5),
        ),
        (
            _LIMITED,
            "10.4 MiB more than free, 16.8 GiB in total; the script allows itself 16.8 GiB",
            full_gpu(_LIMITED).missing_bytes,
            full_gpu(_LIMITED).peak_bytes,
            _gib(16.78),
        ),
        (
            _SHARED,
            "1.5 GiB more than free, 72.0 GiB in total; other processes use 8.7 GiB of the GPU",
            _gib(1.5),
            72 * GIB,
            _gib(71.5),
        ),
    ],
)
def test_out_of_gpu_memory_is_reported_with_phase_and_missing_bytes(
    message: str, words: str, missing_bytes: int, peak_bytes: int, available_bytes: int
) -> None:
    verdict = judge(
        launcher_code=1,
        stopped_by=None,
        failures={0: RankFailure(exit_code=1, timestamp=5), 1: RankFailure(exit_code=1, timestamp=5)},
        records={
            0: _peer_lost(0),
            1: _record(1, error="OutOfMemoryError", message=message),
        },
        oom_kills=0,
        observations={1: observation(Phase.BACKWARD, step=12)},
        num_ranks=2,
    )
    assert verdict == RunEnd(
        exit_code=1,
        cause=f"rank 1 ran out of GPU memory, in backward of step 13: {words}",
        kind=EndKind.GPU_OUT_OF_MEMORY,
        rank=1,
        phase=Phase.BACKWARD,
        missing_bytes=missing_bytes,
        peak_bytes=peak_bytes,
        available_bytes=available_bytes,
        observed=observation(Phase.BACKWARD, step=12),
    )
