"""This node to a Toolchain: CUDA, compilers and DeepSpeed's ops. Takes seconds, most of them in a child."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.machine.compiler import find_cxx, find_ninja, find_nvcc, has_libaio, python_header
from zerofit.machine.extensions import extensions_folders, find_build_locks, is_op_compiled
from zerofit.machine.gpus import probe_driver
from zerofit.machine.toolchain import DeepSpeedOp, Toolchain, TorchBuild

if TYPE_CHECKING:
    from collections.abc import Mapping

REPORT_COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("torch_report.py")))
"""-P keeps the program's folder off sys.path, where modules of ours would hide others of the same name."""
_REPORT_TIMEOUT_S = 180
"""ASSUMPTION: an import that takes longer hangs. It takes 3 s from a local disk, a minute from a slow one."""


def probe_toolchain(
    *,
    environ: Mapping[str, str] = os.environ,
    home: Path | None = None,
    report_command: tuple[str, ...] = REPORT_COMMAND,
    nvml: Any = None,
) -> Toolchain:
    """Return what can be compiled on this node, and with what.

    Args:
        environ: the environment.
        home: the user's home folder; None asks the system.
        report_command: the program that reports on torch and DeepSpeed.
        nvml: the pynvml module, or one like it; None imports pynvml.
    """
    report = ask_torch(report_command, environ=environ)
    torch_build = _torch_build(report["torch"]["answer"])
    top, folder = extensions_folders(
        environ=environ,
        home=home or Path.home(),
        cuda_version=torch_build.cuda_version if torch_build else None,
    )
    cxx_name, cxx = find_cxx(environ=environ)
    ninja, ninja_off_path = find_ninja(environ=environ)
    return Toolchain(
        driver=probe_driver(nvml=nvml),
        visible_devices=environ.get("CUDA_VISIBLE_DEVICES"),
        torch_build=torch_build,
        torch_error=report["torch"]["error"],
        nvcc=find_nvcc(environ=environ),
        skips_cuda_check=environ.get("DS_SKIP_CUDA_CHECK") == "1",
        cxx_name=cxx_name,
        cxx=cxx,
        ninja=ninja,
        ninja_off_path=ninja_off_path,
        python_header=str(python_header()),
        has_python_header=python_header().exists(),
        has_libaio=has_libaio(cxx=cxx, environ=environ),
        ops=_ops(report["deepspeed"]["answer"] or [], folder),
        deepspeed_error=report["deepspeed"]["error"],
        build_locks=find_build_locks(top),
    )


def ask_torch(command: tuple[str, ...], *, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what torch and DeepSpeed say of themselves: {"torch" and "deepspeed": {"answer", "error"}}.

    Args:
        command: the program that prints the report.
        environ: the environment it gets.
    """
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_REPORT_TIMEOUT_S,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return _no_report(f"the import did not end within {_REPORT_TIMEOUT_S} s")
    if result.returncode != 0:
        last_line = (result.stderr.strip().splitlines() or ["no message"])[-1]
        return _no_report(f"the import ended with exit code {result.returncode}: {last_line}")
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def _no_report(error: str) -> dict[str, Any]:
    silence = {"answer": None, "error": error}
    return {"torch": silence, "deepspeed": silence}


def _torch_build(answer: dict[str, Any] | None) -> TorchBuild | None:
    if answer is None:
        return None
    cuda = answer["cuda"]
    # torch.version.cuda may carry a third number, which nothing here depends on.
    major, minor = (int(part) for part in cuda.split(".")[:2]) if cuda else (0, 0)
    return TorchBuild(cuda_version=(major, minor) if cuda else None, cuda_error=answer["cuda_error"])


def _ops(answer: list[dict[str, Any]], folder: Path) -> tuple[DeepSpeedOp, ...]:
    return tuple(
        DeepSpeedOp(
            name=op["name"],
            is_in_wheel=op["is_in_wheel"],
            is_compiled=is_op_compiled(op["name"], folder=folder),
            is_compatible=op["is_compatible"],
            needs_nvcc=op["needs_nvcc"],
        )
        for op in answer
    )
