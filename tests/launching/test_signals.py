"""Signals to zerofit reach the script, and no process is left behind."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import psutil
import pytest
from forked_programs import ForkedProgram
from running_launches import assert_all_gone
from runs import SCRIPTS, environment

WAIT = str(SCRIPTS / "wait.py")
SAVE = str(SCRIPTS / "save.py")
RANKS = {1: (), 2: ("--num-processes", "2", "--engine", "native")}
EACH_NUMBER_OF_RANKS = [pytest.param(1, marks=pytest.mark.slow), 2]
SIGNALS = [pytest.param(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
"""Each signal, and the exit code that it makes; Ctrl-C on a terminal sends the second."""
PATIENCE_S = 60


def start_waiting(folder: Path, num_ranks: int, *ignored: str) -> tuple[ForkedProgram, list[psutil.Process]]:
    """Launch the waiting script; return the launch and every process below it, once all ranks wait."""
    process = _start(folder, num_ranks, WAIT, *ignored)
    pids = [int(pid) for rank in range(num_ranks) for pid in (folder / f"waiting{rank}").read_text().split()]
    below = psutil.Process(process.pid).children(recursive=True)
    assert set(pids) <= {child.pid for child in below}
    return process, below


def _command(num_ranks: int, *target: str) -> list[str]:
    return [sys.executable, "-m", "zerofit", "launch", "--cpu", *RANKS[num_ranks], *target]


def _start(folder: Path, num_ranks: int, *target: str) -> ForkedProgram:
    """Launch a script as a fork; return once all ranks wait."""
    process = ForkedProgram(_command(num_ranks, *target), cwd=folder, env=environment())
    wait_for_ranks(folder, process, num_ranks)
    return process


def wait_for_ranks(folder: Path, process: subprocess.Popen[str] | ForkedProgram, num_ranks: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not all((folder / f"waiting{rank}").exists() for rank in range(num_ranks)):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("num_ranks", EACH_NUMBER_OF_RANKS)
@pytest.mark.parametrize(("number", "exit_code"), SIGNALS)
def test_a_signal_ends_the_whole_run(
    number: signal.Signals, exit_code: int, num_ranks: int, tmp_path: Path
) -> None:
    process, below = start_waiting(tmp_path, num_ranks)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == exit_code
    assert_all_gone(below)
    (folder,) = (tmp_path / "zerofit-runs").glob("2*")
    assert f"zerofit: stopped by {number.name}; its log and record are in {folder}\n" in stderr
    assert json.loads((folder / "run.json").read_text())["exit_code"] == exit_code


@pytest.mark.slow
def test_two_signals_at_once_are_one_request_and_a_later_one_kills(tmp_path: Path) -> None:
    # GNU timeout signals the process and then its whole group.
    process, below = start_waiting(tmp_path, 1, "SIGTERM")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    time.sleep(2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 143
    assert_all_gone(below)


@pytest.mark.parametrize("num_ranks", EACH_NUMBER_OF_RANKS)
def test_a_run_does_not_outlive_a_killed_zerofit(num_ranks: int, tmp_path: Path) -> None:
    process, below = start_waiting(tmp_path, num_ranks)
    scripts_own = [child for child in below if child.name() == "sleep"]
    process.kill()
    process.wait()
    for child in scripts_own:  # they are the script's affair then
        child.kill()
    assert_all_gone(below)


def assert_saved(folder: Path, num_ranks: int, name: str) -> None:
    """Check that each rank was sent the signal once, and had the time to save."""
    assert [(folder / f"saved{rank}").read_text() for rank in range(num_ranks)] == [name] * num_ranks


@pytest.mark.parametrize("num_ranks", EACH_NUMBER_OF_RANKS)
@pytest.mark.parametrize(("number", "exit_code"), SIGNALS)
def test_a_script_has_the_time_to_save(
    number: signal.Signals, exit_code: int, num_ranks: int, tmp_path: Path
) -> None:
    process = _start(tmp_path, num_ranks, SAVE)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == exit_code, stderr
    assert_saved(tmp_path, num_ranks, number.name)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", EACH_NUMBER_OF_RANKS)
def test_a_script_has_the_time_to_save_after_ctrl_c_on_a_terminal(num_ranks: int, tmp_path: Path) -> None:
    terminal, stdio = pty.openpty()
    process = subprocess.Popen(
        _command(num_ranks, SAVE),
        cwd=tmp_path,
        env=environment(),
        stdin=stdio,
        stdout=stdio,
        stderr=stdio,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(stdio, termios.TIOCSCTTY, 0),
    )
    os.close(stdio)
    try:
        wait_for_ranks(tmp_path, process, num_ranks)
        os.write(terminal, b"\x03")
        shown = read_all(terminal)
        assert process.wait(timeout=PATIENCE_S) == 130, shown
    finally:
        process.kill()
        os.close(terminal)
    assert "Traceback" not in shown
    assert_saved(tmp_path, num_ranks, "SIGINT")


def read_all(terminal: int) -> str:
    """Return what a terminal shows until no process has it open."""
    shown = b""
    while select.select([terminal], [], [], PATIENCE_S)[0]:
        try:
            shown += os.read(terminal, 65536)
        except OSError:  # the last one has closed it
            break
    return shown.decode()
