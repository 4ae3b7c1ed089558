"""What stands still is named, and after the limit the run ends with all stacks; so is the rank that left."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
from running_launches import TRAIN, RunningLaunch, assert_all_gone

pytestmark = pytest.mark.faults
_STANDS = str(Path(__file__).parent / "scripts" / "stands.py")
_LIMIT = ("--hang-limit", "6")


def test_a_stopped_rank_is_named_and_ends_the_run(start: Callable[..., RunningLaunch]) -> None:
    run = start("--hang-limit", "5", TRAIN, "3000")
    _, stopped = run.wait_for_step(3)
    below = run.below()
    os.kill(stopped.pid, signal.SIGSTOP)
    exit_code, said = run.end()
    assert exit_code == 1, said
    assert f"zerofit: rank 1 (process {stopped.pid}) is stopped by a signal, in " in said
    record = run.record()
    assert (record["kind"], record["rank"]) == ("hang", 1)
    assert f"rank 1 (process {stopped.pid}) is stopped by a signal in " in record["cause"]
    assert re.search(
        r"; rank 0 (is|waits in all_reduce, called by backward\(\) at \S+, in) .* of step \d+",
        record["cause"],
    )
    assert "backward" in (run.run_folder / "ranks" / "rank0.stack").read_text()
    assert_all_gone(below)


_STALLS_AT = 1 + next(
    at for at, line in enumerate(Path(TRAIN).read_text().splitlines()) if "sleep(10000)" in line
)


@pytest.mark.parametrize("engine", ["native", "deepspeed", "fsdp2"])
def test_the_rank_that_lacks_a_collective_is_named(engine: str, start: Callable[..., RunningLaunch]) -> None:
    run = start("--hang-limit", "5", TRAIN, "3000", "stall", "1", "4", engine=engine, as_forks=True)
    exit_code, said = run.end()
    assert exit_code == 1, said
    record = run.record()
    assert (record["kind"], record["rank"], record["phase"]) == ("hang", 1, "forward"), record["cause"]
    stalls = rf"rank 1 is in forward of step 5, at \S+train\.py:{_STALLS_AT}, without the all_reduce of the "
    stalls += "others; "
    waits = r"rank 0 waits in all_reduce, called (by \w+\(\) )?at \S+train\.py:\d+, in \w+ of step 5; "
    assert re.search(stalls + waits, record["cause"]), record["cause"]


def test_a_run_that_only_takes_its_time_is_left_alone(start: Callable[..., RunningLaunch]) -> None:
    run = start(
        "--hang-limit", "3", TRAIN, "60", num_ranks=1, as_forks=True
    )  # 6 s, and no phase is longer than 0.1 s
    exit_code, said = run.end()
    assert (exit_code, run.record()["cause"]) == (0, None), said
    assert not list((run.run_folder / "ranks").glob("*.stack"))


_HANGS = {
    ("before the Accelerator", 1): "rank 1 is in loading, before the first step, at ",
    ("before the Accelerator", 0): "rank 0 is in loading, before the first step, at ",
    ("save_state", 0): "rank 0 waits in all_gather_object, called by save_state() at ",
    ("save_state", 1): "rank 1 waits in all_gather_object, called by save_state() at ",
    ("wait_for_everyone", 1): "rank 1 waits in barrier, called by wait_for_everyone() at ",
    ("gather", 0): "rank 0 waits in all_gather, called by gather() at ",
    ("gather", 1): "rank 1 waits in all_gather, called by gather() at ",
    ("broadcast_object_list", 0): "rank 0 waits in broadcast_object_list, called at ",
    ("broadcast_object_list", 1): "rank 1 waits in broadcast_object_list, called at ",
    ("a lock", 1): "rank 1 is in forward of step 5, in wait() at ",
    ("a pipe", 0): "rank 0 is in forward of step 5, in read_text() at ",
    ("a loop", 1): ", though rank 1 used CPU time; rank 1 is in forward of step 5, at ",
    ("a pattern", 1): ", though rank 1 used CPU time; rank 1 is in forward of step 5, in match() at ",
    ("a child", 0): "rank 0 is in forward of step 5, in run() at ",
    ("a peer", 1): "rank 1 is in forward of step 5, in accept() at ",
    ("a DataLoader's worker", 1): "rank 1 is in waiting for data of step ",
    ("a stopped copier", 1): ", and the process that copies rank 1's output (process ",
    ("an exit handler", 1): "rank 1 has ended after 10 steps, but its process runs on",
    ("a thread", 0): "rank 0 has ended after 10 steps, but its process runs on",
    ("an error, then an exit handler", 1): "rank 1 has failed with KeyError, and its process does not end",
}


_CONFIRM = {("before the Accelerator", 0), ("save_state", 1), ("gather", 1), ("broadcast_object_list", 1)}
_CONFIRM |= {("evaluates", 1), ("a killed copier", 0), ("a forked child", 0), ("a daemon", 0)}
_CONFIRM |= {("SIGHUP", 0), ("SIGHUP", 1), ("os._exit", 0), ("SIGTERM", 1)}
_CONFIRM |= {("wait_for_everyone", 1), ("a pipe", 0), ("a thread", 0)}
"""What another rank's fault, another signal or another call of the same kind shows already."""


def _of_ranks(faults: Iterable[tuple[str, int]]) -> list[Any]:
    return [
        pytest.param(*fault, id="{}, {}".format(*fault), marks=[pytest.mark.slow] * (fault in _CONFIRM))
        for fault in faults
    ]


@pytest.mark.parametrize(("fault", "rank"), _of_ranks(_HANGS))
def test_each_hang_is_ended_and_named_with_rank_and_call(
    start: Callable[..., RunningLaunch], fault: str, rank: int
) -> None:
    run = start("--no-capture", *_LIMIT, _STANDS, fault, str(rank), as_forks=True)
    exit_code, said = run.end(within_s=240)
    record = run.record()
    assert exit_code == 1, said
    assert (record["kind"], record["rank"]) == ("hang", rank), record["cause"]
    assert _HANGS[fault, rank] in record["cause"], record["cause"]
    assert (run.run_folder / "ranks" / f"rank{rank}.stack").stat().st_size
    if fault in ("gather", "broadcast_object_list"):  # two ranks, each in a collective of its own
        mine, others = record["cause"].split("; ")[1:3]
        assert mine.endswith(", in forward of step 5, which no other rank has called")
        assert others.startswith(f"rank {1 - rank} waits in all_reduce, called by backward() at ")
        assert others.endswith(", in backward of step 5")


_HARMLESS = ["prepares", "evaluates", "a killed copier", "a forked child", "a daemon"]


@pytest.mark.parametrize(
    ("fault", "rank"),
    # Only the main process prepares.
    _of_ranks((fault, rank) for rank in (0, 1) for fault in _HARMLESS if (fault, rank) != ("prepares", 1)),
)
def test_what_only_takes_its_time_or_does_no_harm_ends_well(
    start: Callable[..., RunningLaunch], fault: str, rank: int
) -> None:
    leaves_nothing = fault in ("prepares", "evaluates")
    run = start("--no-capture", *_LIMIT, _STANDS, fault, str(rank), as_forks=leaves_nothing)
    exit_code, said = run.end(within_s=240)
    assert (exit_code, run.record()["cause"]) == (0, None), said
    log = (run.run_folder / "logs" / f"rank{rank}.log").read_text()
    said_of_it = f"zerofit: the process that copied the output of rank {rank} was killed; another goes on\n"
    printed = "".join(f"after it {number:04}\n" for number in range(1000))
    assert log.replace(said_of_it, "") == (printed if fault == "a killed copier" else ""), log[-500:]
    if not leaves_nothing and fault != "a daemon":  # which goes on, as under accelerate launch
        assert [process for process in psutil.process_iter() if _belongs_to(process, run)] == []


def _belongs_to(process: psutil.Process, run: RunningLaunch) -> bool:
    try:
        return str(run.run_folder) in " ".join(process.cmdline())
    except psutil.Error:
        return False


_LEAVES = {
    "os._exit": (
        "script-error",
        "rank {} ended with exit code 0 after 4 steps without a record, as by os._exit(0)",
    ),
    "SIGTERM": ("signal", "rank {} was killed by signal 15 (SIGTERM)"),
    "SIGHUP": ("signal", "rank {} was killed by signal 1 (SIGHUP)"),
}


@pytest.mark.parametrize(("fault", "rank"), _of_ranks((fault, rank) for fault in _LEAVES for rank in (0, 1)))
def test_the_rank_that_left_is_named_not_the_one_that_lost_it(
    start: Callable[..., RunningLaunch], fault: str, rank: int
) -> None:
    run = start("--no-capture", _STANDS, fault, str(rank), as_forks=True)
    exit_code, said = run.end(within_s=240)
    kind, cause = _LEAVES[fault]
    record = run.record()
    assert exit_code != 0, said
    assert (record["kind"], record["rank"]) == (kind, rank), record["cause"]
    assert record["cause"].startswith(cause.format(rank))


def test_a_launcher_that_was_stopped_is_named_and_resumed_once_nothing_goes_on(
    start: Callable[..., RunningLaunch],
) -> None:
    run = start("--no-capture", *_LIMIT, _STANDS, "a stopped launcher", "0")
    exit_code, said = run.end(within_s=240)
    assert (exit_code, run.record()["cause"]) == (0, None), said
    assert "accelerate launch (process " in said
    assert ") is stopped by a signal; `kill -CONT " in said
    assert "nothing goes on: accelerate launch (process " in said
