"""What torch compiles DeepSpeed's CPU ops with: C++ compiler, ninja, Python's headers, libaio; and nvcc."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.machine.toolchain import Nvcc

if TYPE_CHECKING:
    from collections.abc import Mapping

_LIBAIO_PROGRAM = "#include <libaio.h>\nint main() { return io_destroy(0); }\n"


def find_cxx(*, environ: Mapping[str, str]) -> tuple[str, str | None]:
    """Return the C++ compiler that torch calls, and where it is, or None where PATH does not lead to it.

    Source: torch/utils/cpp_extension.py, get_cxx_compiler.
    """
    name = environ.get("CXX", "c++")
    return name, _which(name, environ)


def find_ninja(*, environ: Mapping[str, str], scripts: Path | None = None) -> tuple[str | None, str | None]:
    """Return ninja as PATH finds it, and ninja beside this Python where PATH does not lead.

    torch calls ninja by its bare name, so pip's is found only in an activated environment.

    Args:
        environ: the environment.
        scripts: the folder of this Python's programs; None asks Python.
    """
    beside = (scripts or Path(sysconfig.get_path("scripts"))) / "ninja"
    on_path = _which("ninja", environ)
    return on_path, str(beside) if on_path is None and beside.exists() else None


def python_header() -> Path:
    """Return where Python.h belongs, there or not."""
    return Path(sysconfig.get_path("include"), "Python.h")


def has_libaio(*, cxx: str | None, environ: Mapping[str, str]) -> bool | None:
    """Return whether a program with libaio compiles and links, or None without a compiler.

    DeepSpeed's own check only links, so it passes without the header that the build then lacks.
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
    """Return the CUDA compiler in the CUDA_HOME that torch would find, or None where it finds none.

    Source: torch/utils/cpp_extension.py, _find_cuda_home; DeepSpeed takes CUDA_HOME from there.

    Args:
        environ: the environment.
        root: the file-system root that usr/local/cuda is looked for under.
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
    """Return what the command prints, or None where it fails or hangs."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=60, env=dict(environ)
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout
