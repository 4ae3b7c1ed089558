"""Who ends a run is named; signals reach the ranks; nothing outlives zerofit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from running_launches import TRAIN, RunningLaunch, assert_all_gone
from runs import environment

pytestmark = pytest.mark.faults


def test_a_rank_that_left_early_is_the_cause_not_the_one_that_lost_it(
    start: Callable[..., RunningLaunch],
) -> None:
    run = start(TRAIN, "3000", "leave", "1", "5")
    exit_code, said = run.end()
    assert exit_code == 1, said
    record = run.record()
    assert record["cause"] == (
        "rank 1 ended with exit code 0 after 5 steps, and rank 0, still training, lost its connection to it"
    )
    assert (record["kind"], record["rank"]) == ("script-error", 1)


def test_sigusr1_reaches_the_ranks_and_one_that_they_do_not_handle_leaves_a_record(
    start: Callable[..., RunningLaunch],
) -> None:
    run = start(TRAIN, "3000")
    (before, _) = run.wait_for_step(2)
    run.process.send_signal(signal.SIGUSR1)
    run.wait_for_step(before.step + 10)  # it trains on
    assert sorted(path.name for path in run.folder.glob("noted*")) == ["noted0", "noted1"]
    below = run.below()
    run.process.send_signal(signal.SIGUSR2)
    exit_code, said = run.end()
    assert exit_code == 128 + signal.SIGUSR2, said
    assert (run.record()["exit_code"], run.record()["kind"]) == (exit_code, "signal")
    assert "was killed by signal 12 (SIGUSR2)" in run.record()["cause"]
    assert_all_gone(below)


def test_no_rank_outlives_zerofit_and_its_agent_killed_together(
    start: Callable[..., RunningLaunch],
) -> None:
    run = start(TRAIN, "3000")
    run.wait_for_step(2)
    below = run.below()
    agent, *_ = psutil.Process(run.process.pid).children()
    for process in (psutil.Process(run.process.pid), agent):
        process.kill()
    assert_all_gone(below)


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.2])
def test_no_agent_outlives_a_zerofit_killed_at_its_start(after_s: float, tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from zerofit.launching.watch import run_watched\n"
        "agent = [sys.executable, '-m', 'zerofit.launching.agent', str(os.getpid()), '1', 'cpu']\n"
        f"run_watched([*agent, {TRAIN!r}, '3000'], environment={{}})\n"
    )
    zerofit = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, env=environment())
    until = time.monotonic() + 30
    while not (found := psutil.Process(zerofit.pid).children()):
        assert time.monotonic() < until
        time.sleep(0.001)
    time.sleep(after_s)
    zerofit.kill()
    zerofit.wait()
    assert_all_gone(found)


def test_a_full_disk_does_not_change_how_a_training_ended(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("may not mount here")
    script = tmp_path / "fill.py"
    script.write_text(
        "import contextlib, sys\n"
        "with contextlib.suppress(OSError), open(f'{sys.argv[1]}/fill', 'wb', buffering=0) as file:\n"
        "    while True:\n"
        "        file.write(bytes(4096))\n"
    )
    full = tmp_path / "full"
    full.mkdir()
    launch = f"{sys.executable} -m zerofit launch --cpu --num-processes 1 --run-dir {full} {script} {full}"
    kept = f"cp -r {full}/2* {tmp_path}/kept"
    run = subprocess.run(
        [
            "unshare",
            "-m",
            "sh",
            "-c",
            f"mount -t tmpfs -o size=1m none {full}; {launch}; code=$?; {kept}; exit $code",
        ],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert "the record of the run can't be written: No space left on device" in run.stderr
    assert "; its record could not be written into " in run.stderr
    assert not (tmp_path / "kept" / "run.json").exists()
    shutil.rmtree(tmp_path / "kept")


def test_a_closed_terminal_gives_the_exit_code_that_the_record_says(tmp_path: Path) -> None:
    terminal, stdio = os.openpty()
    zerofit = [sys.executable, "-m", "zerofit", "launch", "--cpu", "--num-processes", "1", TRAIN, "3000"]
    process = subprocess.Popen(
        ["setsid", "--ctty", *zerofit],
        cwd=tmp_path,
        env=environment(),
        stdin=stdio,
        stdout=stdio,
        stderr=stdio,
    )
    os.close(stdio)
    run = RunningLaunch(process, tmp_path)  # type: ignore[arg-type]
    run.wait_for_step(2, ranks=1)
    os.close(terminal)
    assert process.wait(timeout=60) == 129
    assert run.record()["exit_code"] == 129
