"""probe_toolchain, and the child that reports on torch and DeepSpeed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from zerofit.machine.probe_toolchain import REPORT_COMMAND, ask_torch, probe_toolchain
from zerofit.machine.toolchain import DeepSpeedOp, TorchBuild

_PYTHON = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"


def _touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def _reporting(report: object) -> tuple[str, ...]:
    return (sys.executable, "-c", f"print({json.dumps(report)!r})")


def _ds_op(name: str, *, is_in_wheel: bool = False, is_compatible: bool = True) -> dict[str, object]:
    return {"name": name, "is_in_wheel": is_in_wheel, "is_compatible": is_compatible, "needs_nvcc": True}


def test_toolchain_joins_the_report_with_what_lies_in_the_extensions_folder(tmp_path: Path) -> None:
    _touch(tmp_path / f".cache/torch_extensions/{_PYTHON}_cu130/async_io/async_io.so")
    stale = _touch(tmp_path / f".cache/torch_extensions/{_PYTHON}_cpu/cpu_adam/lock")
    report = {
        "torch": {"answer": {"cuda": "13.0", "cuda_error": "no driver"}, "error": None},
        "deepspeed": {"answer": [_ds_op("async_io"), _ds_op("fused_adam", is_in_wheel=True)], "error": None},
    }
    environ = {"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "1", "DS_SKIP_CUDA_CHECK": "1"}
    toolchain = probe_toolchain(environ=environ, home=tmp_path, report_command=_reporting(report))
    assert toolchain.torch_build == TorchBuild(cuda_version=(13, 0), cuda_error="no driver")
    assert toolchain.ops == (
        DeepSpeedOp(
            name="async_io", is_in_wheel=False, is_compiled=True, is_compatible=True, needs_nvcc=True
        ),
        DeepSpeedOp(
            name="fused_adam", is_in_wheel=True, is_compiled=False, is_compatible=True, needs_nvcc=True
        ),
    )
    assert [lock.path for lock in toolchain.build_locks] == [str(stale)]
    assert (toolchain.cxx, toolchain.ninja, toolchain.has_libaio) == (None, None, None)
    assert (toolchain.visible_devices, toolchain.skips_cuda_check) == ("1", True)


@pytest.mark.parametrize(
    ("program", "error"),
    [
        (
            "import sys; print('noise'); sys.exit('ImportError: libcudart.so')",
            "the import ended with exit code 1: ImportError: libcudart.so",
        ),
        ("import os; os._exit(3)", "the import ended with exit code 3: no message"),
        ("import os; os.kill(os.getpid(), 9)", "the import ended with exit code -9: no message"),
    ],
)
def test_child_that_dies_is_a_finding_not_a_crash(program: str, error: str) -> None:
    silence = {"answer": None, "error": error}
    report = ask_torch((sys.executable, "-c", program), environ=os.environ)
    assert report == {"torch": silence, "deepspeed": silence}


def test_report_of_the_real_torch_and_deepspeed() -> None:
    report = ask_torch(REPORT_COMMAND, environ=os.environ)
    assert (report["torch"]["error"], report["deepspeed"]["error"]) == (None, None)
    ops = {op["name"]: op["is_compatible"] for op in report["deepspeed"]["answer"]}
    assert list(ops) == ["cpu_adam", "fused_adam", "async_io"]
    assert ops["cpu_adam"] is True


def test_report_says_what_is_not_installed(tmp_path: Path) -> None:
    _, no_path_change, program = REPORT_COMMAND
    # -S leaves site-packages out, so that neither package is found.
    report = ask_torch((sys.executable, "-S", no_path_change, program), environ=os.environ)
    assert report["torch"] == {
        "answer": None,
        "error": "ModuleNotFoundError: No module named 'torch'",
    }
    assert report["deepspeed"]["answer"] is None
