"""A run that ends in the middle of a build leaves no lock on which the next one would wait forever."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from forked_programs import ForkedProgram
from runs import environment

_BUILDS = """
import os, sys, time
from pathlib import Path
from torch.utils.file_baton import FileBaton

folder = Path(os.environ["TORCH_EXTENSIONS_DIR"], "some_op")
folder.mkdir(exist_ok=True)
baton = FileBaton(str(folder / "lock"))
if not baton.try_acquire():
    baton.wait()
    sys.exit(0)
if "ends" in sys.argv:
    baton.release()
    sys.exit(0)
if "fails" in sys.argv:
    os._exit(3)
Path("builds").write_text(str(os.getpid()))
time.sleep(600)
"""
_LAUNCH = (sys.executable, "-m", "zerofit", "launch", "--cpu", "--no-capture", "--engine", "native")


def _start(folder: Path, *arguments: str) -> ForkedProgram:
    (folder / "train.py").write_text(_BUILDS)
    (folder / "ext").mkdir(exist_ok=True)
    command = (*_LAUNCH, "--num-processes", "1", "train.py", *arguments)
    variables = environment(TORCH_EXTENSIONS_DIR=str(folder / "ext"))
    return ForkedProgram(command, cwd=folder, env=variables)


@pytest.mark.parametrize(
    "ended_by",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        "rank",
        pytest.param("fails", marks=pytest.mark.slow),
        "ends",
    ],
)
def test_a_run_takes_its_lock_with_it(ended_by: signal.Signals | str, tmp_path: Path) -> None:
    is_quick = ended_by in ("fails", "ends")
    run = _start(tmp_path, *((str(ended_by),) if is_quick else ()))
    until = time.monotonic() + 120
    while not is_quick and not (tmp_path / "builds").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    lock = tmp_path / "ext" / "some_op" / "lock"
    assert is_quick or lock.exists()
    if ended_by == "rank":
        psutil.Process(int((tmp_path / "builds").read_text())).kill()
    elif isinstance(ended_by, signal.Signals):
        run.send_signal(ended_by)
    _, said = run.communicate(timeout=120)
    assert (run.returncode == 0) == (ended_by == "ends"), said
    assert lock.parent.is_dir()
    assert not lock.exists()


@pytest.mark.long
def test_a_lock_of_another_is_left_to_it(tmp_path: Path) -> None:
    lock = tmp_path / "ext" / "other_op" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    _, said = _start(tmp_path, "fails").communicate(timeout=120)
    assert lock.exists(), said
