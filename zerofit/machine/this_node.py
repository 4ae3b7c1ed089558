"""Probes this node's Machine in milliseconds, without importing torch or other libraries."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.facts import Machine
from zerofit.core.units import KIB
from zerofit.machine.cgroup import cpu_quota, memory_limits
from zerofit.machine.gpus import probe_gpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


def probe_machine(
    *,
    gpu_ids: tuple[int, ...] | None = None,
    may_be_unreadable: bool = False,
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    nvml: Any = None,
) -> Machine:
    """Return the resources of this node that a run may use; rates that need a measurement are None.

    Args:
        gpu_ids: the ids from --gpu-ids, numbered as in nvidia-smi; None uses CUDA_VISIBLE_DEVICES.
        may_be_unreadable: ignore GPUs that exist but can't be read.
        root: the file-system root for /dev, /proc and /sys.
        environ: the environment.
        nvml: the pynvml module or a replacement; None imports pynvml.

    Raises:
        UserError: an id in gpu_ids does not exist or is repeated; or there are GPUs, but none can be read.
    """
    limits = memory_limits(root=root)
    return Machine(
        gpus=probe_gpus(
            gpu_ids=gpu_ids,
            visible_devices=environ.get("CUDA_VISIBLE_DEVICES"),
            may_be_unreadable=may_be_unreadable,
            root=root,
            nvml=nvml,
        ),
        num_cpu_cores=count_cpu_cores(os.sched_getaffinity(0), root=root),
        host_memory_bytes=min(
            [read_meminfo("MemTotal", root=root), *(limit.limit_bytes for limit in limits)]
        ),
        host_memory_available_bytes=free_host_bytes(root=root),
        nvme_bytes=nvme_free_bytes(root=root),
    )


def free_host_bytes(*, root: Path = Path("/")) -> int:
    """Return the host memory that this process can still allocate within its cgroups' limits."""
    free = [limit.limit_bytes - limit.used_bytes for limit in memory_limits(root=root)]
    return max(0, min([read_meminfo("MemAvailable", root=root), *free]))


def count_cpu_cores(cpus: Iterable[int], *, root: Path) -> int:
    """Return the physical cores of these logical CPUs, or the cgroup's CPU quota if smaller.

    Args:
        cpus: the logical CPUs that the process may run on.
        root: the file-system root.
    """
    cores = len({_siblings(cpu, root) for cpu in cpus})
    quota = cpu_quota(root=root)
    return cores if quota is None else max(1, min(cores, int(quota)))


def read_meminfo(field: str, *, root: Path = Path("/")) -> int:
    """Return a field of /proc/meminfo in bytes.

    psutil reads the same file, but under no other root.
    """
    return _bytes_of(field, root / "proc/meminfo")


def process_bytes(field: str) -> int:
    """Return a field of /proc/self/status in bytes: VmRSS, VmHWM (its peak) or VmData."""
    # Not getrusage: its ru_maxrss starts at the peak of the parent that forked this process.
    return _bytes_of(field, Path("/proc/self/status"))


def _bytes_of(field: str, file: Path) -> int:
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * KIB
    raise KeyError(field)


def _siblings(cpu: int, root: Path) -> str:
    """Return the logical CPUs of this one's core, in the kernel's notation; itself alone if unknown."""
    try:
        return (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


_REMOTE_MODELS = ("Amazon Elastic Block Store",)
"""Remote disks with an NVMe interface, behind a network too slow for offload.

Source: https://docs.aws.amazon.com/ebs/latest/userguide/identify-nvme-ebs-device.html
"""


def _free_bytes(folder: Path) -> int:
    """Return the space that an ordinary user may still write in a folder."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def nvme_free_bytes(*, root: Path, free_bytes: Callable[[Path], int] = _free_bytes) -> int:
    """Return the free space of the largest file system on NVMe disks; 0 without one.

    Offload uses one folder, so file systems don't add up; a RAID or volume over several disks is one file
    system, and counts if all its disks are NVMe.

    Args:
        root: the file-system root for /proc and /sys.
        free_bytes: returns the free space of a folder's file system.
    """
    sizes = [0]
    for device, mount in _writable_mounts(root):
        folder = root / mount.lstrip("/")
        # A container mounts single files of the host, such as /etc/hosts.
        if folder.is_dir() and _is_local_nvme(root / "sys/dev/block" / device):
            try:
                sizes.append(free_bytes(folder))
            except OSError:
                continue
    return max(sizes)


def _writable_mounts(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (major:minor, mount point) of each writable mount.

    Source: https://man7.org/linux/man-pages/man5/proc_pid_mountinfo.5.html
    """
    try:
        lines = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, device, _, folder, options, *_ = line.split()
        if "rw" in options.split(","):
            # The kernel escapes spaces, tabs, newlines and backslashes in names as octal numbers.
            yield device, re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), folder)


def _is_local_nvme(device: Path) -> bool:
    """Return True if a block device in /sys is a local NVMe disk, or consists only of such disks."""
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
