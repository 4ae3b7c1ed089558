"""This node to a Machine, in milliseconds: no torch, accelerate, deepspeed or transformers is imported."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.facts import Machine
from zerofit.probe.cgroup import cpu_quota, memory_limits
from zerofit.probe.gpus import probe_gpus
from zerofit.probe.nvme import nvme_free_bytes
from zerofit.units import KIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


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
    installed, available = (read_meminfo(name, root=root) for name in ("MemTotal", "MemAvailable"))
    return Machine(
        gpus=probe_gpus(
            gpu_ids=gpu_ids,
            visible_devices=environ.get("CUDA_VISIBLE_DEVICES"),
            may_be_unreadable=may_be_unreadable,
            root=root,
            nvml=nvml,
        ),
        num_cpu_cores=count_cpu_cores(os.sched_getaffinity(0), root=root),
        host_memory_bytes=min([installed, *(limit.limit_bytes for limit in limits)]),
        host_memory_available_bytes=max(
            0, min([available, *(limit.limit_bytes - limit.used_bytes for limit in limits)])
        ),
        nvme_bytes=nvme_free_bytes(root=root),
    )


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
    for line in (root / "proc/meminfo").read_text().splitlines():
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
