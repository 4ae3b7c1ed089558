"""The compiler of DeepSpeed's ops is found where torch looks for it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from zerofit.machine.probe_toolchain import find_cxx, find_ninja, find_nvcc, has_libaio
from zerofit.machine.toolchain import Nvcc


def _program(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def _environ_with(folder: Path, **variables: str) -> dict[str, str]:
    return {"PATH": str(folder), **variables}


def test_cxx_is_what_torch_would_call(tmp_path: Path) -> None:
    default, other = _program(tmp_path / "c++"), _program(tmp_path / "clang++")
    assert find_cxx(environ=_environ_with(tmp_path)) == ("c++", str(default))
    assert find_cxx(environ=_environ_with(tmp_path, CXX="clang++")) == ("clang++", str(other))
    assert find_cxx(environ=_environ_with(tmp_path, CXX="icpx")) == ("icpx", None)


def test_ninja_beside_python_counts_only_where_path_does_not_lead(tmp_path: Path) -> None:
    beside = _program(tmp_path / "venv/bin/ninja")
    system = _program(tmp_path / "usr/bin/ninja")
    empty = tmp_path / "empty"
    assert find_ninja(environ=_environ_with(system.parent), scripts=beside.parent) == (str(system), None)
    assert find_ninja(environ=_environ_with(empty), scripts=beside.parent) == (None, str(beside))
    assert find_ninja(environ=_environ_with(empty), scripts=empty) == (None, None)


_NVCC_SAYS = 'echo "Cuda compilation tools, release 12.4, V12.4.131"'


def test_nvcc_is_looked_for_where_torch_looks(tmp_path: Path) -> None:
    home, path, usual = (
        _program(tmp_path / f"{name}/bin/nvcc", _NVCC_SAYS) for name in ("home", "path", "x")
    )
    nvcc = {name: Nvcc(path=str(name), version=(12, 4)) for name in (home, path, usual)}
    on_path = str(path.parent)
    assert find_nvcc(environ={"PATH": on_path, "CUDA_HOME": f"{tmp_path}/home"}, root=tmp_path) == nvcc[home]
    assert find_nvcc(environ={"PATH": on_path, "CUDA_PATH": f"{tmp_path}/home"}, root=tmp_path) == nvcc[home]
    assert find_nvcc(environ={"PATH": on_path}, root=tmp_path) == nvcc[path]
    assert find_nvcc(environ={"PATH": f"{tmp_path}/empty"}, root=tmp_path) is None


@pytest.mark.parametrize("text", ["exit 1", "echo no release here"])
def test_nvcc_that_does_not_answer_has_no_version(tmp_path: Path, text: str) -> None:
    nvcc = _program(tmp_path / "bin/nvcc", text)
    found = find_nvcc(environ={"PATH": "", "CUDA_HOME": str(tmp_path)})
    assert found == Nvcc(path=str(nvcc), version=None)


def test_libaio_needs_header_and_library(tmp_path: Path) -> None:
    """A library of that name, compiled here, stands for libaio; its header is taken away afterwards."""
    _, cxx = find_cxx(environ=os.environ)
    assert cxx is not None
    header, source = tmp_path / "libaio.h", tmp_path / "aio.cpp"
    header.write_text('extern "C" int io_destroy(void *);\n')
    source.write_text(f'#include "{header}"\nint io_destroy(void *) {{ return 0; }}\n')
    subprocess.run([cxx, "-shared", "-fPIC", source, "-o", tmp_path / "libaio.so"], check=True)
    environ = {**os.environ, "CFLAGS": f"-nostdinc -I{tmp_path}", "LDFLAGS": f"-L{tmp_path}"}
    assert has_libaio(cxx=cxx, environ=environ) is True
    header.unlink()
    assert has_libaio(cxx=cxx, environ=environ) is False
    assert has_libaio(cxx=None, environ=environ) is None
