"""Probes this node's Toolchain: CUDA, compilers, DeepSpeed's ops. Takes seconds, mostly in a subprocess."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.machine.extensions import extensions_folders, find_build_locks, is_op_compiled
from zerofit.machine.gpus import probe_driver
from zerofit.machine.programs import output_of
from zerofit.machine.toolchain import DeepSpeedOp, Nvcc, Toolchain, TorchBuild

if TYPE_CHECKING:
    from collections.abc import Mapping

REPORT_COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("torch_report.py")))
"""-P keeps the program's folder off sys.path, where our modules would shadow others of the same name."""
_LIBAIO_PROGRAM = "#include <libaio.h>\nint main() { return io_destroy(0); }\n"
_REPORT_TIMEOUT_S = 180
"""ASSUMPTION: a longer import hangs. It takes 3 s from a local disk, a minute from a slow one."""


def probe_toolchain(
    *,
    environ: Mapping[str, str] = os.environ,
    home: Path | None = None,
    report_command: tuple[str, ...] = REPORT_COMMAND,
    nvml: Any = None,
) -> Toolchain:
    """Return the toolchain of this node.

    Args:
        environ: the environment.
        home: the user's home folder; None asks the system.
        report_command: the program that reports on torch and DeepSpeed.
        nvml: the pynvml module or a replacement; None imports pynvml.
    """
    report = ask_torch(report_command, environ=environ)
    torch_build = _torch_build(report["torch"]["answer"])
    top, folder = extensions_folders(
        environ=environ,
        home=home or Path.home(),
        cuda_version=torch_build.cuda_version if torch_build else None,
    )
    cxx_name, cxx = find_cxx(environ=environ)
    header = Path(sysconfig.get_path("include"), "Python.h")
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
        python_header=str(header),
        has_python_header=header.exists(),
        has_libaio=has_libaio(cxx=cxx, environ=environ),
        ops=_ops(report["deepspeed"]["answer"] or [], folder),
        deepspeed_error=report["deepspeed"]["error"],
        build_locks=find_build_locks(top),
    )


def ask_torch(command: tuple[str, ...], *, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the report of torch and DeepSpeed: {"torch" and "deepspeed": {"answer", "error"}}.

    Args:
        command: the program that prints the report.
        environ: its environment.
    """
    output, why = output_of(command, limit_s=_REPORT_TIMEOUT_S, environ=environ, named="the import")
    silence = {"answer": None, "error": why}
    return {"torch": silence, "deepspeed": silence} if why else json.loads(output)


def _torch_build(answer: dict[str, Any] | None) -> TorchBuild | None:
    if answer is None:
        return None
    cuda = answer["cuda"]
    # torch.version.cuda may have a third number, which is ignored.
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


def find_cxx(*, environ: Mapping[str, str]) -> tuple[str, str | None]:
    """Return the C++ compiler that torch calls, and its path, or None if it is not in PATH.

    Source: torch/utils/cpp_extension.py, get_cxx_compiler.
    """
    name = environ.get("CXX", "c++")
    return name, _which(name, environ)


def find_ninja(*, environ: Mapping[str, str], scripts: Path | None = None) -> tuple[str | None, str | None]:
    """Return ninja in PATH, and ninja beside this Python if it is not in PATH.

    torch calls ninja by name, so pip's is found only in an activated environment.

    Args:
        environ: the environment.
        scripts: the folder of this Python's scripts; None asks Python.
    """
    beside = (scripts or Path(sysconfig.get_path("scripts"))) / "ninja"
    on_path = _which("ninja", environ)
    return on_path, str(beside) if on_path is None and beside.exists() else None


def has_libaio(*, cxx: str | None, environ: Mapping[str, str]) -> bool | None:
    """Return True if a program with libaio compiles and links, or None without a compiler.

    DeepSpeed's own check only links, so it passes without the header that the build needs.
    """
    if cxx is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "libaio.cpp")
        source.write_text(_LIBAIO_PROGRAM)
        flags = [shlex.split(environ.get(name, "")) for name in ("CFLAGS", "LDFLAGS")]
        command = [cxx, *flags[0], str(source), "-o", str(Path(folder, "libaio")), *flags[1], "-laio"]
        return _run(command, environ) is not None


def find_nvcc(*, environ: Mapping[str, str], root: Path = Path("/")) -> Nvcc | None:
    """Return the CUDA compiler in the CUDA_HOME that torch would use, or None.

    Source: torch/utils/cpp_extension.py, _find_cuda_home; DeepSpeed takes CUDA_HOME from there.

    Args:
        environ: the environment.
        root: the file-system root for usr/local/cuda.
    """
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    if home is None and (found := _which("nvcc", environ)):
        home = str(Path(found).parent.parent)
    if home is None and (root / "usr/local/cuda").exists():
        home = str(root / "usr/local/cuda")
    if home is None:
        return None
    path = str(Path(home, "bin/nvcc"))
    release = re.search(r"release (\d+)\.(\d+)", _run([path, "--version"], environ) or "")
    return Nvcc(path=path, version=(int(release[1]), int(release[2])) if release else None)


def _which(program: str, environ: Mapping[str, str]) -> str | None:
    return shutil.which(program, path=environ.get("PATH", os.defpath))


def _run(command: list[str], environ: Mapping[str, str]) -> str | None:
    """Return a command's output, or None if it fails or hangs."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=60, env=dict(environ)
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout
