"""Builds of DeepSpeed's ops: their outcome, and locks that killed builds left."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from gpu_truth.builds import CpuAdamBuild, is_compiled

from zerofit.core.strategy import Engine, OffloadDevice, Strategy, ZeroStage

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


def _waited(build: CpuAdamBuild) -> list[str]:
    """Wait for a build, and return what is said of that."""
    told: list[str] = []
    build.wait(told.append)
    return told


def test_ops_that_fail_are_not_there_and_the_last_line_says_why(lock: Path, tmp_path: Path) -> None:
    build = CpuAdamBuild(tmp_path / "log", on_cpu=False, program="raise SystemExit('no compiler')")
    assert _waited(build)[1:] == ["DeepSpeed's ops can't be built: no compiler"]
    assert not build.is_there()
    assert build.why == "DeepSpeed's ops can't be built: no compiler"


def test_a_build_is_waited_for_up_to_its_limit_and_then_goes_on_alone(lock: Path, tmp_path: Path) -> None:
    build = CpuAdamBuild(tmp_path / "log", on_cpu=False, program=SLEEPS, limit_s=1)
    assert not build.is_there()
    assert (build.is_running, build.why) == (True, "")
    start = time.monotonic()
    assert _waited(build)[1:] == ["DeepSpeed's ops were not built within 1 s"]
    assert time.monotonic() - start >= 1
    assert not build.is_there()
    assert (build.is_running, build.why) == (True, "DeepSpeed's ops were not built within 1 s")


def test_a_build_has_the_environment_of_the_cases(
    lock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    program = "from os import environ as e; exit(repr((e['CUDA_VISIBLE_DEVICES'], e['DS_ACCELERATOR'])))"
    build = CpuAdamBuild(tmp_path / "log", on_cpu=True, program=program)
    assert _waited(build)[1:] == ["DeepSpeed's ops can't be built: ('', 'cpu')"]


def test_an_older_lock_that_nobody_holds_is_named_and_nothing_waits_on_it(lock: Path, tmp_path: Path) -> None:
    lock.touch()
    os.utime(lock, (0, 0))
    build = CpuAdamBuild(tmp_path / "log", on_cpu=False)
    assert _waited(build) == [f"{lock} is left of a build that was ended: remove it"]
    assert not build.is_there()
    assert (build.is_running, (tmp_path / "log").exists()) == (False, False)


def test_a_lock_that_a_process_holds_is_no_lock_of_an_ended_one(lock: Path, tmp_path: Path) -> None:
    with lock.open("w"):
        os.utime(lock, (0, 0))
        build = CpuAdamBuild(tmp_path / "log", on_cpu=False, program="pass")
        _waited(build)
        assert build.is_there()
    assert lock.exists()


def test_the_lock_of_a_case_that_was_ended_is_removed(lock: Path, tmp_path: Path) -> None:
    build = CpuAdamBuild(tmp_path / "log", on_cpu=False, program="pass")
    _waited(build)
    assert build.is_there()
    lock.touch()
    assert build.is_there()
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
