"""Signals to zerofit reach the script, and no process is left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest
from runs import SCRIPTS, environment

if TYPE_CHECKING:
    from pathlib import Path

WAIT = str(SCRIPTS / "wait.py")
RANKS = {1: (), 2: ("--num-processes", "2", "--engine", "native")}
PATIENCE_S = 60


def start_waiting(
    folder: Path, num_ranks: int, *ignored: str
) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """Launch the waiting script; return the launch and every process below it, once all ranks wait."""
    command = [sys.executable, "-m", "zerofit", "launch", "--cpu", *RANKS[num_ranks], WAIT, *ignored]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + PATIENCE_S
    while not all((folder / f"waiting{rank}").exists() for rank in range(num_ranks)):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    pids = [int(pid) for rank in range(num_ranks) for pid in (folder / f"waiting{rank}").read_text().split()]
    below = psutil.Process(process.pid).children(recursive=True)
    assert set(pids) <= {child.pid for child in below}
    return process, below


def assert_all_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_whole_run(
    number: signal.Signals, exit_code: int, num_ranks: int, tmp_path: Path
) -> None:
    process, below = start_waiting(tmp_path, num_ranks)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == exit_code
    assert_all_gone(below)
    (folder,) = (tmp_path / "zerofit-runs").iterdir()
    assert f"zerofit: stopped by {number.name}; its log and record are in {folder}\n" in stderr
    assert json.loads((folder / "run.json").read_text())["exit_code"] == exit_code


def test_a_second_signal_kills_what_ignores_the_first(tmp_path: Path) -> None:
    process, below = start_waiting(tmp_path, 1, "SIGTERM")
    process.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 143
    assert_all_gone(below)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_a_run_does_not_outlive_a_killed_zerofit(num_ranks: int, tmp_path: Path) -> None:
    process, below = start_waiting(tmp_path, num_ranks)
    process.kill()
    process.wait()
    for child in below:
        if child.name() == "sleep":  # the script's own child is the script's own affair then
            child.kill()
    assert_all_gone(below)
