"""A rank, the agent or zerofit is killed, stopped or interrupted in each phase."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from running_launches import RunningLaunch, assert_all_gone

from zerofit.core.checkpoints import find_checkpoints

_SCRIPT = str(Path(__file__).parent / "scripts" / "phases.py")
_SAVED_AFTER = 3
"""Steps, as in the script."""
_PHASES = ("start", "data", "forward", "backward", "optimizer step", "evaluation", "saving")
_FAULTS = {
    ("SIGKILL", "rank"): (137, "was killed by signal 9"),
    ("SIGKILL", "agent"): (137, "was killed by signal 9"),
    ("SIGKILL", "zerofit"): (-9, None),
    ("SIGSTOP", "rank"): (1, "is stopped by a signal"),
    ("SIGINT", "zerofit"): (130, "SIGINT"),
}
"""Signal and who gets it: zerofit's exit code, and what the record says; None without a record."""
_QUICK = {("SIGKILL", "rank", "backward")}
_CASES = [
    pytest.param(
        number,
        victim,
        phase,
        id=f"{number}-{victim}-{phase}",
        marks=pytest.mark.slow if (number, victim, phase) in _QUICK else pytest.mark.faults,
    )
    for number, victim in _FAULTS
    for phase in _PHASES
]


@pytest.mark.parametrize(("number", "victim", "phase"), _CASES)
def test_nothing_is_left_and_nothing_lost_after_the_last_checkpoint(
    start: Callable[..., RunningLaunch],
    note_fault: Callable[..., None],
    tmp_path: Path,
    number: str,
    victim: str,
    phase: str,
) -> None:
    limit = ("--hang-limit", "3") if number == "SIGSTOP" else ()
    run = start("--no-capture", *limit, _SCRIPT, number, victim, phase, num_ranks=1)
    below = _all_below_until_the_end(run)
    ended_at = time.time()
    exit_code, said = run.end()
    assert_all_gone(below)
    gone_at = time.time()
    expected, cause = _FAULTS[number, victim]
    assert exit_code == expected, said
    if cause is not None:
        record = run.record()
        assert record["exit_code"] == exit_code
        assert cause in str(record["cause"])
    assert [name for one in below for name in Path("/dev/shm").glob(f"*_{one.pid}_*")] == []
    checkpoints = find_checkpoints(tmp_path / "project" / "checkpoints", digests=True)
    complete = [one for one in checkpoints if one.is_complete]
    assert bool(complete) == (phase != "start")
    fault_at = float((tmp_path / "at.txt").read_text())
    rank = run.observation(0)
    assert rank is not None
    assert rank.step <= 2 * _SAVED_AFTER
    note_fault(
        f"{number} to {victim}, {phase}",
        ended_after_s=round((gone_at if victim == "zerofit" and cause is None else ended_at) - fault_at, 2),
        exit_code=exit_code,
        cause=None if cause is None else run.record()["cause"],
        steps_lost=max(0, rank.step - _SAVED_AFTER),
        processes_left=0,
        shared_memory_left=0,
    )


def _all_below_until_the_end(run: RunningLaunch) -> list[psutil.Process]:
    """Return all processes that the run ever had, once zerofit has ended."""
    found: dict[int, psutil.Process] = {}
    until = time.monotonic() + 120
    while run.process.poll() is None:
        assert time.monotonic() < until, found
        try:
            found.update({one.pid: one for one in run.below()})
        except psutil.NoSuchProcess:
            break
        time.sleep(0.02)
    assert found
    return list(found.values())
