"""Free space on NVMe disks, against fake trees of /proc and /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerofit.machine.this_node import nvme_free_bytes, probe_machine

_FREE = {"scratch": 3000, "": 500, "home": 800, "my disk": 40}


def _free_bytes(folder: Path) -> int:
    if folder.name not in _FREE:
        raise PermissionError(folder)
    return _FREE[folder.name]


def _mount(device: str, folder: str, options: str = "rw,noatime") -> str:
    return f"36 35 {device} / {folder} {options} shared:1 - ext4 /dev/some rw\n"


def _tree(root: Path, mounts: str) -> Path:
    """Lay two NVMe disks, the first with a partition, one of a network, a SATA disk, and two RAIDs."""
    for number, device, model in [
        ("259:0", "nvme0n1", "SAMSUNG"),
        ("259:2", "nvme1n1", "SAMSUNG"),
        ("259:3", "nvme2n1", "Amazon Elastic Block Store"),
        ("8:0", "sda", "Seagate"),
        ("9:0", "md0", ""),
        ("9:1", "md1", ""),
    ]:
        block = root / "sys/devices" / device
        (block / "device").mkdir(parents=True)
        (block / "device/model").write_text(f"{model}  \n")
        _link(root / "sys/dev/block" / number, block)
    partition = root / "sys/devices/nvme0n1/nvme0n1p1"
    partition.mkdir()
    (partition / "partition").write_text("1\n")
    _link(root / "sys/dev/block/259:1", partition)
    for raid, disks in {"md0": ("nvme0n1", "nvme1n1"), "md1": ("nvme0n1", "sda")}.items():
        for disk in disks:
            _link(root / "sys/devices" / raid / "slaves" / disk, root / "sys/devices" / disk)
    for name in ("scratch", "home", "my disk", "private"):
        (root / "mnt" / name).mkdir(parents=True)
    (root / "mnt/hosts").touch()
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text(mounts)
    return root


def _link(link: Path, target: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)


@pytest.mark.parametrize(
    ("mounts", "num_bytes"),
    [
        pytest.param("", 0, id="nothing mounted"),
        pytest.param(_mount("259:2", "/mnt/scratch"), 3000, id="a whole disk"),
        pytest.param(_mount("259:1", "/mnt/scratch"), 3000, id="a partition"),
        pytest.param(_mount("9:0", "/mnt/scratch"), 3000, id="a RAID of NVMe disks"),
        pytest.param(_mount("9:1", "/mnt/scratch"), 0, id="a RAID that is half SATA"),
        pytest.param(_mount("8:0", "/mnt/scratch"), 0, id="SATA"),
        pytest.param(_mount("259:3", "/mnt/scratch"), 0, id="a disk behind a network"),
        pytest.param(_mount("0:52", "/mnt/scratch"), 0, id="no block device: an overlay, tmpfs or NFS"),
        pytest.param(_mount("259:2", "/mnt/scratch", "ro,noatime"), 0, id="read-only"),
        pytest.param(_mount("259:2", "/mnt/hosts"), 0, id="a single file, as containers have"),
        pytest.param(_mount("259:2", "/mnt/private"), 0, id="a file system that can't be asked"),
        pytest.param(_mount("259:2", "/mnt/my\\040disk"), 40, id="a blank in the name"),
        pytest.param(
            _mount("259:1", "/mnt/home") + _mount("259:2", "/mnt/scratch"), 3000, id="two do not add up"
        ),
    ],
)
def test_free_space_is_that_of_the_largest_local_nvme_file_system(
    tmp_path: Path, mounts: str, num_bytes: int
) -> None:
    assert nvme_free_bytes(root=_tree(tmp_path, mounts), free_bytes=_free_bytes) == num_bytes


def test_the_machine_states_its_free_space(tmp_path: Path) -> None:
    root = _tree(tmp_path, _mount("259:2", "/mnt/scratch"))
    (root / "proc/meminfo").write_text("MemTotal: 64 kB\nMemAvailable: 60 kB\n")
    assert probe_machine(root=root, environ={}).nvme_bytes > 0
