"""What came first decides, in one log and across logs: a hang is not the time limit that ended it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from zerofit.launching.explain import explain_bytes, explain_logs
from zerofit.launching.timeline import EvidenceLine, keys_in_time

_LIMIT = "slurmstepd: error: *** JOB 71 ON n4 CANCELLED AT 2025-03-02T{time} DUE TO TIME LIMIT ***\n"
_HANG = (
    "[rank1]:[E302 {time}.104 ProcessGroupNCCL.cpp:629] [Rank 1] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600021 "
    "milliseconds\n"
)
_FULL = "[2025-03-02 {time},100] [INFO] step\n[rank2]: OSError: [Errno 28] No space left on device\n"
_KILLED = "[2025-03-02 {time},100] [INFO] step\nfailed (exitcode: -9) local_rank: 0 (pid: 7)\n"
_LOST = "[rank3]: RuntimeError: Connection closed by peer [10.0.0.3]:29500\n"
_STEPS = "".join(f"{{'loss': 1.{step}, 'epoch': 0.{step}}}\n" for step in range(300))
_ODD = (
    "[2025-03-02 {time},100] [INFO] step\nTraceback (most recent call last):\n"
    '  File "/home/me/train.py", line 8, in <module>\nmy.OddError: no\n'
)


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (_HANG.format(time="10:42:11") + _LIMIT.format(time="20:00:00"), "nccl-timeout"),
        (_LIMIT.format(time="20:00:00") + _HANG.format(time="20:00:09"), "time-limit"),
        (_KILLED.format(time="10:42:11") + _LIMIT.format(time="20:00:00"), "killed"),
        (_FULL.format(time="10:42:11") + _LIMIT.format(time="20:00:00"), "disk-full"),
        (_ODD.format(time="10:42:11") + _LIMIT.format(time="20:00:00"), "unknown-exception"),
        (_ODD.format(time="10:42:11") + _STEPS + _LIMIT.format(time="20:00:00"), "time-limit"),
        (
            _HANG.format(time="10:42:11") + "traceback: Signal 15 (SIGTERM) received by PID 9\n",
            "nccl-timeout",
        ),
        (_HANG.format(time="10:42:11") + "failed (exitcode: -9) local_rank: 1\n", "nccl-timeout"),
        ("failed (exitcode: -9) local_rank: 1\n" + _HANG.format(time="10:52:11"), "killed"),
        (_STEPS + _LIMIT.format(time="20:00:00"), "time-limit"),
        (_LOST + _LIMIT.format(time="20:00:00"), "peer-lost"),
        (_LOST + _STEPS + _LIMIT.format(time="20:00:00"), "time-limit"),
        (
            _HANG.format(time="10:42:11")
            + _LIMIT.format(time="20:00:00").replace("TIME LIMIT", "PREEMPTION"),
            "nccl-timeout",
        ),
        ("Segmentation fault (core dumped)\n" + _LIMIT.format(time="20:00:00"), "segmentation-fault"),
    ],
)
def test_what_came_first_in_a_log_is_the_cause(log: str, cause: str) -> None:
    found = explain_bytes(io.BytesIO(log.encode()), "log").cause
    assert found is not None
    assert found.failure.id == cause


@pytest.mark.parametrize(
    ("logs", "cause"),
    [
        (
            {"a-slurm.out": _LIMIT.format(time="20:00:00"), "rank1.log": _HANG.format(time="10:42:11")},
            "nccl-timeout",
        ),
        (
            {"rank1.log": _HANG.format(time="20:00:30"), "slurm.out": _LIMIT.format(time="20:00:00")},
            "time-limit",
        ),
        (
            {"a-slurm.out": _LIMIT.format(time="20:00:00"), "rank2.log": _FULL.format(time="10:42:11")},
            "disk-full",
        ),
        (
            {"a-slurm.out": _LIMIT.format(time="20:00:00"), "rank0.log": _KILLED.format(time="10:42:11")},
            "killed",
        ),
        (
            {
                "rank1.log": _HANG.format(time="10:42:11"),
                "rank2.log": _FULL.format(time="10:32:00"),
                "slurm.out": _LIMIT.format(time="20:00:00"),
            },
            "disk-full",
        ),
    ],
)
def test_what_came_first_across_logs_is_the_cause(tmp_path: Path, logs: dict[str, str], cause: str) -> None:
    for name, text in logs.items():
        (tmp_path / name).write_text(text)
    found = explain_logs(sorted(tmp_path.iterdir()), root=tmp_path).cause
    assert found is not None
    assert found.failure.id == cause


def _place(file: str, line: int, *moment: int) -> EvidenceLine:
    return EvidenceLine(
        file=file, line=line, text="", rank=None, moment=(*moment, 0, 0, 0, 0) if moment else None
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("places", "order"),
    [
        ([_place("b", 1, 3, 2), _place("a", 1, 3, 3)], "b1 a1"),
        (
            [_place("a", 1, 3, 2), _place("a", 2, 3, 1), _place("b", 1, 3, 3)],
            "a1 a2 b1",
        ),  # a clock that goes back
        ([_place("a", 1, 1, 1), _place("b", 1, 12, 31)], "b1 a1"),  # New Year's Eve
        ([_place("a", 1, 1, 1), _place("b", 1, 6, 30)], "a1 b1"),
        ([_place("b", 5), _place("a", 9), _place("a", 2)], "a2 a9 b5"),  # no times
        ([_place("a", 1), _place("b", 1, 3, 3)], "b1 a1"),
        ([_place("a", 3, 3, 9), _place("a", 7), _place("b", 1, 3, 10)], "a3 a7 b1"),  # as the line before it
    ],
)
def test_lines_are_ordered_within_a_log_and_by_time_between_logs(
    places: list[EvidenceLine], order: str
) -> None:
    keys = keys_in_time(places, files=["a", "b"])
    assert " ".join(f"{file}{line}" for file, line in sorted(keys, key=keys.__getitem__)) == order


_STUCK = (
    "[rank{rank}]:[E302 {time}.104 ProcessGroupNCCL.cpp:1484] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] "
    "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued "
    "collectives. This typically indicates a NCCL/CUDA API hang\n"
)
_MONITOR = (
    "[rank1]:[E302 10:40:00.1 ProcessGroupNCCL.cpp:1316] [PG 0 Rank 1] Heartbeat monitor timed out! Process "
    "will be terminated after dumping debug info. workMetaList_.size()=7\n"
)
_TERM = "srun: forcing job termination\ntorch.distributed.elastic: Process 7 got signal: 15\n"


@pytest.mark.parametrize(
    ("log", "cause", "others"),
    [
        (_STUCK.format(rank=2, time="10:42:11"), "watchdog-stuck", []),
        (_MONITOR + _STUCK.format(rank=1, time="10:50:11"), "watchdog-stuck", []),
        (
            _STUCK.format(rank=2, time="10:42:11") + _HANG.format(time="10:44:00"),
            "watchdog-stuck",
            ["nccl-timeout"],
        ),
        (  # aborting the communicators then gets stuck
            _HANG.format(time="10:42:11") + _STUCK.format(rank=1, time="10:50:11"),
            "nccl-timeout",
            ["watchdog-stuck"],
        ),
        (
            _STUCK.format(rank=0, time="10:42:11") + _LIMIT.format(time="20:00:00"),
            "watchdog-stuck",
            ["time-limit"],
        ),
        (_STUCK.format(rank=0, time="10:42:11") + "exitcode: -6\n", "watchdog-stuck", ["aborted"]),
        (
            "[rank0]: torch.OutOfMemoryError: CUDA out of memory.\n" + _STUCK.format(rank=1, time="10:42:11"),
            "gpu-out-of-memory",
            ["watchdog-stuck"],
        ),
    ],
)
def test_a_stuck_watchdog_is_no_collective_at_its_time_limit(log: str, cause: str, others: list[str]) -> None:
    found = explain_bytes(io.BytesIO(log.encode()), "log")
    assert found.cause is not None
    assert (found.cause.failure.id, [other.failure.id for other in found.others]) == (cause, others)


@pytest.mark.parametrize(
    ("log", "cause", "others"),
    [
        (_LIMIT.format(time="20:00:00") + _TERM, "time-limit", []),
        (_TERM + _LIMIT.format(time="20:00:00"), "time-limit", []),
        (
            "slurmstepd: error: *** STEP 71.0 ON n4 CANCELLED AT 2025-03-02T20:00:00 ***\n"
            + _LIMIT.format(time="20:00:00")
            + "Signal 15 (SIGTERM) received by PID 9\n",
            "time-limit",
            [],
        ),
        (_LIMIT.format(time="20:00:00").replace("TIME LIMIT", "PREEMPTION") + _TERM, "preempted", []),
        (_LIMIT.format(time="20:00:00").replace("TIME LIMIT", "NODE FAILURE") + _TERM, "node-failed", []),
        (_HANG.format(time="10:42:11") + _TERM, "nccl-timeout", []),
        (_LIMIT.format(time="20:00:00") + _LOST, "time-limit", ["peer-lost"]),
        (_TERM, "cancelled", []),
        (_FULL.format(time="10:42:11") + "KeyboardInterrupt\n", "disk-full", ["cancelled"]),
    ],
)
def test_the_schedulers_own_signal_is_nobodys_interruption(log: str, cause: str, others: list[str]) -> None:
    found = explain_bytes(io.BytesIO(log.encode()), "log")
    assert found.cause is not None
    assert (found.cause.failure.id, [other.failure.id for other in found.others]) == (cause, others)
