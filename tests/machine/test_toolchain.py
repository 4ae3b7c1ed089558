"""probe_toolchain: what torch and DeepSpeed report, compilers, and torch's folder of compiled ops."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zerofit.machine.extensions import (
    clear_abandoned_locks,
    extensions_folders,
    find_build_locks,
    is_op_compiled,
    ops_to_compile,
    sign_lock,
)
from zerofit.machine.probe_toolchain import (
    REPORT_COMMAND,
    ask_torch,
    find_cxx,
    find_ninja,
    find_nvcc,
    has_libaio,
    probe_toolchain,
)
from zerofit.machine.toolchain import BuildLock, DeepSpeedOp, Nvcc, TorchBuild

_PYTHON = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"


def _touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


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
    command = (sys.executable, "-c", f"print({json.dumps(report)!r})")
    toolchain = probe_toolchain(environ=environ, home=tmp_path, report_command=command)
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
            "the import ended with 1: ImportError: libcudart.so",
        ),
        ("import os; os._exit(3)", "the import ended with 3: it printed nothing"),
        ("import os; os.kill(os.getpid(), 9)", "the import ended with -9: it printed nothing"),
    ],
)
def test_child_that_dies_is_a_finding_not_a_crash(program: str, error: str) -> None:
    silence = {"answer": None, "error": error}
    report = ask_torch((sys.executable, "-c", program), environ=os.environ)
    assert report == {"torch": silence, "deepspeed": silence}


def test_report_says_what_is_not_installed(tmp_path: Path) -> None:
    _, no_path_change, program = REPORT_COMMAND
    # -S leaves site-packages out, so that neither package is found.
    report = ask_torch((sys.executable, "-S", no_path_change, program), environ=os.environ)
    assert report["torch"] == {
        "answer": None,
        "error": "ModuleNotFoundError: No module named 'torch'",
    }
    assert report["deepspeed"]["answer"] is None


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


@pytest.mark.parametrize(
    ("environ", "cuda_version", "top", "folder"),
    [
        ({}, None, "/home/me/.cache/torch_extensions", f"{_PYTHON}_cpu"),
        ({}, (12, 6), "/home/me/.cache/torch_extensions", f"{_PYTHON}_cu126"),
        ({"XDG_CACHE_HOME": "/fast"}, None, "/fast/torch_extensions", f"{_PYTHON}_cpu"),
        ({"TORCH_EXTENSIONS_DIR": "/ext"}, (12, 6), "/ext", ""),
    ],
)
def test_extensions_folder_is_where_torch_builds(
    environ: dict[str, str], cuda_version: tuple[int, int] | None, top: str, folder: str
) -> None:
    folders = extensions_folders(environ=environ, home=Path("/home/me"), cuda_version=cuda_version)
    assert folders == (Path(top), Path(top, folder))


@pytest.mark.filterwarnings("ignore:Setuptools is replacing distutils")
def test_extensions_folder_agrees_with_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.cpp_extension import _get_build_directory

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _, folder = extensions_folders(environ=os.environ, home=Path("/"), cuda_version=None)
    # The folder's end names torch's CUDA, which differs between the machines that run this.
    assert _get_build_directory("cpu_adam", False).startswith(str(folder).removesuffix("cpu"))


def test_op_is_compiled_where_its_library_lies(tmp_path: Path) -> None:
    _touch(tmp_path / "cpu_adam/cpu_adam_v1.so")
    (tmp_path / "async_io").mkdir()
    assert is_op_compiled("cpu_adam", folder=tmp_path)
    assert not is_op_compiled("async_io", folder=tmp_path)
    assert not is_op_compiled("fused_adam", folder=tmp_path)


def test_ops_are_to_be_compiled_where_no_build_of_this_python_has_them(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    _touch(tmp_path / "torch_extensions" / f"{_PYTHON}_cu130" / "cpu_adam" / "cpu_adam.so")
    _touch(tmp_path / "torch_extensions" / "py27_cpu" / "async_io" / "async_io.so")
    names = ("cpu_adam", "async_io")
    assert ops_to_compile(names, environ=environ, home=Path("/")) == ("async_io",)
    assert ops_to_compile(names, environ={}, home=tmp_path) == names


def test_lock_is_held_while_a_process_has_it_open_and_stale_after(tmp_path: Path) -> None:
    lock = tmp_path / "py311_cpu/cpu_adam/lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w"):
        (held,) = find_build_locks(tmp_path)
    two_hours_ago = lock.stat().st_mtime - 7200
    os.utime(lock, (two_hours_ago, two_hours_ago))
    (stale,) = find_build_locks(tmp_path)
    assert held == BuildLock(path=str(lock), age_s=held.age_s, is_held=True)
    assert stale == BuildLock(path=str(lock), age_s=stale.age_s, is_held=False)
    assert stale.age_s == pytest.approx(7200, abs=60)


def test_a_launch_removes_what_a_killed_build_left_and_warns_of_what_it_is_not_sure_of(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "torch_extensions"
    old, young, held = (folder / f"py311_cpu/{op}/lock" for op in ("cpu_adam", "cpu_adagrad", "async_io"))
    for lock in (old, young, held):
        _touch(lock)
    for lock in (old, held):
        os.utime(lock, (0, 0))
    with held.open():
        said = list(clear_abandoned_locks(environ={"XDG_CACHE_HOME": str(tmp_path)}, home=tmp_path))
    days = int(time.time() // 86400)
    assert said == [
        f"no process here holds {young}; if none does on another node, this run waits for it forever: rm "
        f"{young}",
        f"removed {old}: torch made it {days} days ago while it compiled, and no process has it open, "
        "so that build was killed; runs would wait for it forever",
    ]
    assert (old.exists(), young.exists(), held.exists()) == (False, True, True)


@pytest.mark.parametrize(
    ("text", "is_held", "are_signed", "is_removed"),
    [
        (None, False, False, True),
        (None, False, True, True),
        (None, True, False, False),
        (None, True, True, False),
        ("", False, False, False),
        ("zerofit another-boot pid:[4026531836] uid 0\n", False, False, False),
        ("zerofit another-boot pid:[4026531836] uid 0\n", False, True, False),
        ("\xff", False, True, False),
    ],
)
def test_a_young_lock_goes_if_it_says_that_its_run_was_here(
    text: str | None, is_held: bool, are_signed: bool, is_removed: bool, tmp_path: Path
) -> None:
    """None is what a run of zerofit on this machine writes into its lock."""
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.write_bytes(b"" if text is None else text.encode("latin-1"))
    if text is None:
        sign_lock(lock)
    with lock.open() if is_held else contextlib.nullcontext():
        environ = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
        said = list(clear_abandoned_locks(environ=environ, home=tmp_path, are_signed=are_signed))
    assert lock.exists() == (not is_removed)
    removed = (
        f"removed {lock}: a run of zerofit here made it 0 minutes ago while it compiled, and no process "
        "has it open, so that build was killed; runs would wait for it forever"
    )
    assert said == [removed] or (not is_removed and all("no process here holds" in line for line in said))


@pytest.mark.parametrize(
    ("age_s", "words"),
    [
        (660, "11 minutes"),
        (7100, "118 minutes"),
        (7300, "2 hours"),
        (97_500, "27 hours"),
        (900_000, "10 days"),
    ],
)
def test_a_removed_lock_is_told_with_its_age(age_s: int, words: str, tmp_path: Path) -> None:
    lock = tmp_path / "cpu_adam/lock"
    _touch(lock)
    os.utime(lock, (time.time() - age_s,) * 2)
    (said,) = clear_abandoned_locks(environ={"TORCH_EXTENSIONS_DIR": str(tmp_path)}, home=tmp_path)
    assert said.startswith(f"removed {lock}: torch made it {words} ago while it compiled, and no")


def test_locks_are_found_in_a_folder_of_the_users_too(tmp_path: Path) -> None:
    _touch(tmp_path / "async_io/lock")
    assert [lock.path for lock in find_build_locks(tmp_path)] == [str(tmp_path / "async_io/lock")]
    assert find_build_locks(tmp_path / "nothing") == ()


def test_a_lock_that_goes_while_it_is_looked_at_is_none(tmp_path: Path) -> None:
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam" / "lock").symlink_to(tmp_path / "gone")
    assert find_build_locks(tmp_path) == ()
