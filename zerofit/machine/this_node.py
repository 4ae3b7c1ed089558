"""This node to a Machine, in milliseconds: no torch, accelerate, deepspeed or transformers is imported."""

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
    """Return what a run on this node may use; rates that only a measurement gives are None.

    Args:
        gpu_ids: the GPUs the user asked for, as nvidia-smi numbers them; None takes what
            CUDA_VISIBLE_DEVICES leaves visible.
        may_be_unreadable: whether GPUs that are there and can't be read are taken for none.
        root: the file-system root that /dev, /proc and /sys are read under.
        environ: the environment.
        nvml: the pynvml module, or one like it; None imports pynvml.

    Raises:
        UserError: an id in gpu_ids is not there, or stands twice; or there are GPUs, none of which can be
            read.
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
    """Return the host memory that this process could still take, within the limits of its cgroups."""
    free = [limit.limit_bytes - limit.used_bytes for limit in memory_limits(root=root)]
    return max(0, min([read_meminfo("MemAvailable", root=root), *free]))


def count_cpu_cores(cpus: Iterable[int], *, root: Path) -> int:
    """Return the physical cores under these logical CPUs, or the cgroup's CPU quota where that is less.

    Args:
        cpus: the logical CPUs that the process may run on.
        root: the file-system root.
    """
    cores = len({_siblings(cpu, root) for cpu in cpus})
    quota = cpu_quota(root=root)
    return cores if quota is None else max(1, min(cores, int(quota)))


def read_meminfo(field: str, *, root: Path = Path("/")) -> int:
    """Return a field of /proc/meminfo, in bytes.

    psutil reads the same file, but not under another root.
    """
    return _bytes_of(field, root / "proc/meminfo")


def process_bytes(field: str) -> int:
    """Return a figure of this process from /proc/self/status: VmRSS, VmHWM, its peak, or VmData."""
    # Not getrusage: its ru_maxrss begins with the peak of the process that forked this one.
    return _bytes_of(field, Path("/proc/self/status"))


def _bytes_of(field: str, file: Path) -> int:
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * KIB
    raise KeyError(field)


def _siblings(cpu: int, root: Path) -> str:
    """Return the logical CPUs of this one's core, in the kernel's words; itself alone where not told."""
    try:
        return (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


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
    """Return True if a block device of /sys is an NVMe disk of this node, or lies on such disks only."""
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
