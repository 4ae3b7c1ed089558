"""A rank that stands still: named at once, and after the limit the run ends with everybody's stacks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from running_launches import TRAIN, RunningLaunch, assert_all_gone

pytestmark = pytest.mark.faults


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
    assert "rank 0 is in backward of step" in record["cause"]
    assert "backward" in (run.run_folder / "ranks" / "rank0.stack").read_text()
    assert_all_gone(below)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_the_rank_that_lacks_a_collective_is_named(engine: str, start: Callable[..., RunningLaunch]) -> None:
    run = start("--hang-limit", "5", TRAIN, "3000", "stall", "1", "4", engine=engine)
    exit_code, said = run.end()
    assert exit_code == 1, said
    record = run.record()
    assert (record["kind"], record["rank"], record["phase"]) == ("hang", 1, "forward"), record["cause"]
    assert "rank 1 is in forward of step 5, without the " in record["cause"]
    assert "; rank 0 waits in " in record["cause"]


def test_a_run_that_only_takes_its_time_is_left_alone(start: Callable[..., RunningLaunch]) -> None:
    run = start("--hang-limit", "3", TRAIN, "60", num_ranks=1)  # 6 s, and no phase is longer than 0.1 s
    exit_code, said = run.end()
    assert (exit_code, run.record()["cause"]) == (0, None), said
    assert not list((run.run_folder / "ranks").glob("*.stack"))
