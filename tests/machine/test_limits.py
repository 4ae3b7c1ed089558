"""Limits that a run can meet, on fake trees and on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub.constants import HF_HUB_CACHE

from zerofit.machine.limits import find_env_files, may_lock_all_memory, probe_disk, probe_limits
from zerofit.machine.toolchain import EnvFile

_INITIAL_NAMESPACE = "         0          0 4294967295\n"


@pytest.mark.parametrize(
    ("capabilities", "uid_map", "may"),
    [
        pytest.param("000001ffffffffff", _INITIAL_NAMESPACE, True, id="root"),
        pytest.param("0000000000000000", _INITIAL_NAMESPACE, False, id="user"),
        pytest.param("00000000a80425fb", _INITIAL_NAMESPACE, False, id="root in docker: no CAP_IPC_LOCK"),
        pytest.param("000001ffffffffff", "0 1000 1\n", False, id="root of a user namespace"),
    ],
)
def test_only_real_root_locks_memory_without_limit(
    tmp_path: Path, capabilities: str, uid_map: str, may: bool
) -> None:
    folder = tmp_path / "proc/self"
    folder.mkdir(parents=True)
    (folder / "status").write_text(f"Name:\tpython\nCapEff:\t{capabilities}\n")
    (folder / "uid_map").write_text(uid_map)
    assert may_lock_all_memory(root=tmp_path) is may


def test_disk_of_a_folder_that_is_not_there_yet_is_that_of_the_nearest_above(tmp_path: Path) -> None:
    folder = tmp_path / "not/yet"
    disk = probe_disk("cache", folder)
    assert (disk.purpose, disk.folder, disk.is_writable) == ("cache", str(folder), True)
    assert disk.free_bytes > 0


def test_env_files_are_counted_but_not_read_out(tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "folder"
    for place, mode in ((home, 0o600), (folder, 0o644)):
        place.mkdir()
        (place / ".deepspeed_env").write_text("HF_TOKEN=hf_secret\nPATH=/bin\nPATH=/usr/bin\n")
        (place / ".deepspeed_env").chmod(mode)
    assert find_env_files(folder=folder, home=home, environ={}) == (
        EnvFile(path=f"{home}/.deepspeed_env", num_variables=2, is_readable_by_all=False),
        EnvFile(path=f"{folder}/.deepspeed_env", num_variables=2, is_readable_by_all=True),
    )
    assert find_env_files(folder=home, home=home, environ={"DS_ENV_FILE": "other"}) == ()


def test_limits_of_this_machine(tmp_path: Path) -> None:
    limits = probe_limits(folder=tmp_path, home=tmp_path, environ={})
    assert limits.installed_memory_bytes > 0
    assert limits.port == 29500
    assert [(disk.purpose, disk.folder) for disk in limits.disks] == [
        ("current folder", str(tmp_path)),
        ("Hugging Face cache", HF_HUB_CACHE),
    ]
    assert limits.env_files == ()
