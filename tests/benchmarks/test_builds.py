"""The build of DeepSpeed's ops: what became of it, and locks that ended builds left."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from gpu_truth.builds import CpuAdamBuild, is_compiled

from zerofit.strategy import Engine, OffloadDevice, Strategy, ZeroStage

DEEPSPEED = Strategy(engine=Engine.DEEPSPEED, zero_stage=ZeroStage.GRADIENTS)
OFFLOADED = Strategy(
    engine=Engine.DEEPSPEED, zero_stage=ZeroStage.GRADIENTS, optimizer_offload=OffloadDevice.CPU
)
SLEEPS = "import time; time.sleep(3)"


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where torch would lock CPU Adam, in a folder of extensions that is not the user's."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    found = tmp_path / "extensions" / "cpu_adam" / "lock"
    found.parent.mkdir(parents=True)
    return found


def _soon() -> float:
    return time.monotonic() + 30


def test_ops_that_load_are_there(lock: Path, tmp_path: Path) -> None:
    program = "import sys; assert sys.argv[1:] == ['CPUAdamBuilder', 'ShareMemCommBuilder']"
    build = CpuAdamBuild(tmp_path / "log", on_cpu=True, program=program)
    assert build.is_there(until=_soon())
    assert (build.is_running, build.why) == (False, "")


def test_ops_that_fail_are_not_there_and_the_last_line_says_why(lock: Path, tmp_path: Path) -> None:
    build = CpuAdamBuild(tmp_path / "log", on_cpu=False, program="raise SystemExit('no compiler')")
    assert not build.is_there(until=_soon())
    assert build.why == "DeepSpeed's ops can't be built: no compiler"


def test_a_build_that_goes_on_is_waited_for_as_long_as_was_said_and_no_longer_than_its_patience(
    lock: Path, tmp_path: Path
) -> None:
    build = CpuAdamBuild(tmp_path / "log", on_cpu=False, program=SLEEPS, patience_s=1)
    start = time.monotonic()
    assert not build.is_there(until=start)
    assert (build.is_running, build.why) == (True, "")
    assert not build.is_there(until=_soon())
    assert (build.is_running, build.why) == (True, "DeepSpeed's ops were not built within 1 s")
    assert time.monotonic() - start < 2.5


def test_an_older_lock_that_nobody_holds_is_named_and_nothing_waits_on_it(
    lock: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock.touch()
    os.utime(lock, (0, 0))
    build = CpuAdamBuild(tmp_path / "log", on_cpu=False)
    assert not build.is_there(until=_soon())
    assert capsys.readouterr().err == f"measure_gpu: {lock} is left of a build that was ended: remove it\n"
    assert (build.is_running, (tmp_path / "log").exists()) == (False, False)


def test_a_lock_that_a_process_holds_is_no_lock_of_an_ended_one(lock: Path, tmp_path: Path) -> None:
    with lock.open("w"):
        os.utime(lock, (0, 0))
        build = CpuAdamBuild(tmp_path / "log", on_cpu=False, program="pass")
        assert build.is_there(until=_soon())
    assert lock.exists()


def test_the_lock_of_a_case_that_was_ended_is_removed(lock: Path, tmp_path: Path) -> None:
    build = CpuAdamBuild(tmp_path / "log", on_cpu=False, program="pass")
    assert build.is_there(until=_soon())
    lock.touch()
    assert build.is_there(until=_soon())
    assert not lock.exists()


@pytest.mark.parametrize(
    ("strategy", "on_cpu", "expected"),
    [
        (Strategy(), True, False),
        (DEEPSPEED, False, False),
        (DEEPSPEED, True, True),
        (OFFLOADED, False, True),
    ],
)
def test_offload_needs_what_is_compiled_and_on_the_cpu_all_of_deepspeed(
    strategy: Strategy, on_cpu: bool, expected: bool
) -> None:
    assert is_compiled(strategy, on_cpu=on_cpu) is expected
