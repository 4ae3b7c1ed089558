"""Free space on this node's own NVMe disks, from /proc and /sys."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_REMOTE_MODELS = ("Amazon Elastic Block Store",)
"""Disks that speak NVMe and stand elsewhere, behind a network too slow to offload to.

Source: https://docs.aws.amazon.com/ebs/latest/userguide/identify-nvme-ebs-device.html
"""


def _free_bytes(folder: Path) -> int:
    """Return what an ordinary user may still write below a folder."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def nvme_free_bytes(*, root: Path, free_bytes: Callable[[Path], int] = _free_bytes) -> int:
    """Return the free space of the largest file system on NVMe disks; 0 where there is none.

    Offload goes to one folder, so that two file systems do not add up; a RAID or volume over several disks is
    one file system, and counts where every disk below it is NVMe.

    Args:
        root: the file-system root that /proc and /sys are read under.
        free_bytes: the free space of the file system that a folder lies on.
    """
    sizes = [0]
    for device, mount in _writable_mounts(root):
        folder = root / mount.lstrip("/")
        # A container has single files of the host mounted, such as /etc/hosts.
        if folder.is_dir() and _is_local_nvme(root / "sys/dev/block" / device):
            try:
                sizes.append(free_bytes(folder))
            except OSError:
                continue
    return max(sizes)


def _writable_mounts(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (major:minor, mount point) of each mount that may be written.

    Source: https://man7.org/linux/man-pages/man5/proc_pid_mountinfo.5.html
    """
    try:
        lines = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, device, _, folder, options, *_ = line.split()
        if "rw" in options.split(","):
            # The kernel writes blanks, tabs, line ends and backslashes in names as octal numbers.
            yield device, re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), folder)


def _is_local_nvme(device: Path) -> bool:
    """Return whether a block device of /sys is an NVMe disk of this node, or lies on such disks only."""
    below = sorted(_folder(device / "slaves"))
    if below:
        return all(_is_local_nvme(disk) for disk in below)
    block = device.resolve()
    disk = block.parent if (block / "partition").exists() else block
    if not disk.name.startswith("nvme"):
        return False
    try:
        model = (disk / "device/model").read_text().strip()
    except OSError:
        model = ""
    return model not in _REMOTE_MODELS


def _folder(path: Path) -> list[Path]:
    return list(path.iterdir()) if path.is_dir() else []
