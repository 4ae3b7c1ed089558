"""torch's extensions folder: where it is, what is compiled there, and which locks are stale."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zerofit.machine.extensions import (
    clear_abandoned_locks,
    extensions_folders,
    find_build_locks,
    is_op_compiled,
    ops_to_compile,
)
from zerofit.machine.toolchain import BuildLock

_PYTHON = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"


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


def test_extensions_folder_agrees_with_torch(tmp_path: Path) -> None:
    program = "from torch.utils.cpp_extension import _get_build_directory as f; print(f('cpu_adam', False))"
    environ = {name: text for name, text in os.environ.items() if name != "TORCH_EXTENSIONS_DIR"}
    environ["XDG_CACHE_HOME"] = str(tmp_path)
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
    _, folder = extensions_folders(environ=environ, home=Path("/"), cuda_version=None)
    # The folder's end names torch's CUDA, which differs between the machines that run this.
    assert result.stdout.strip().startswith(str(folder).removesuffix("cpu"))


def _touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


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
    assert said == [
        f"no process here holds {young}; if none does on another node, this run waits for it for ever: "
        f"rm {young}",
        f"removed {old}, which a killed build left behind, and for which runs wait for ever",
    ]
    assert (old.exists(), young.exists(), held.exists()) == (False, True, True)


def test_locks_are_found_in_a_folder_of_the_users_too(tmp_path: Path) -> None:
    _touch(tmp_path / "async_io/lock")
    assert [lock.path for lock in find_build_locks(tmp_path)] == [str(tmp_path / "async_io/lock")]
    assert find_build_locks(tmp_path / "nothing") == ()
