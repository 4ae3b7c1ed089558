"""Verdicts on what a run can run out of: cores, memory, locked and shared memory, disk, port; left-overs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.core.units import GIB, MIB, format_bytes
from zerofit.machine.doctor.verdict import CheckupLine, ok, warning

if TYPE_CHECKING:
    from zerofit.core.facts import Machine
    from zerofit.machine.toolchain import Disk, EnvFile, Limits

_LOW_MEMORY_BYTES = 4 * GIB
"""ASSUMPTION: one rank of a 1B model under optimizer offload does not start with less; the imports of a rank
alone hold 0.6 GB."""
_LOW_MEMLOCK_BYTES = 10**9
"""One rank's NVMe buffers for parameters, by default: buffer_count 5 x buffer_size 1e8 in bf16.
Source: https://www.deepspeed.ai/docs/config-json/#parameter-offloading"""
_LOW_SHM_BYTES = 512 * MIB
"""Where DeepSpeed's own report warns: deepspeed/env_report.py, get_shm_size."""
_LOW_DISK_BYTES = 20 * GIB
"""ASSUMPTION: room for one checkpoint of a 1B model with its Adam states: 12 bytes a parameter in fp32, 14
beside 16-bit weights (https://arxiv.org/abs/1910.02054, section 3.1)."""


def check_limits(machine: Machine, limits: Limits) -> tuple[CheckupLine, ...]:
    """Return the lines of cores, host memory, memlock, /dev/shm, disks, the port and .deepspeed_env files."""
    return (
        ok("CPU cores", f"{machine.num_cpu_cores} physical"),
        _check_host_memory(machine, limits),
        _check_memlock(limits.memlock_bytes),
        _check_shm(limits.shm_bytes),
        *(_check_disk(disk) for disk in limits.disks),
        _check_port(limits),
        *_check_env_files(limits.env_files),
    )


def _check_host_memory(machine: Machine, limits: Limits) -> CheckupLine:
    found = (
        f"{format_bytes(machine.host_memory_bytes)}, {format_bytes(machine.host_memory_available_bytes)} free"
    )
    is_limited = machine.host_memory_bytes < limits.installed_memory_bytes
    if is_limited:
        found += f"; limited by the cgroup, {format_bytes(limits.installed_memory_bytes)} installed"
    if machine.host_memory_available_bytes >= _LOW_MEMORY_BYTES:
        return ok("host memory", found)
    return warning(
        "host memory",
        found,
        why="ranks that load a model or offload to CPU are killed (exit -9) when it runs out",
        fix="raise the memory of the container or job" if is_limited else "end other processes",
    )


def _check_memlock(memlock_bytes: int | None) -> CheckupLine:
    if memlock_bytes is None:
        return ok("memlock", "no limit")
    if memlock_bytes >= _LOW_MEMLOCK_BYTES:
        return ok("memlock", format_bytes(memlock_bytes))
    return warning(
        "memlock",
        format_bytes(memlock_bytes),
        why="buffers of NVMe offload, and any pinned ones under DS_PIN_MEMORY_BACKEND=native, are locked in "
        "memory",
        fix="ulimit -l unlimited (containers: --ulimit memlock=-1), or offload with pin_memory false",
    )


def _check_shm(shm_bytes: int | None) -> CheckupLine:
    if shm_bytes is not None and shm_bytes >= _LOW_SHM_BYTES:
        return ok("/dev/shm", format_bytes(shm_bytes))
    return warning(
        "/dev/shm",
        "none" if shm_bytes is None else format_bytes(shm_bytes),
        why="NCCL between the ranks and DataLoader workers pass data through it, and die of bus errors when "
        "it is full",
        fix="start the container with --shm-size=8g or --ipc=host (Kubernetes: a Memory emptyDir there)",
    )


def _check_disk(disk: Disk) -> CheckupLine:
    found = f"{format_bytes(disk.free_bytes)} free in {disk.folder}"
    if not disk.is_writable:
        return warning(
            disk.purpose,
            f"{disk.folder} is not writable",
            why="checkpoints, run folders and downloads can't be written",
            fix=f"chmod u+w {disk.folder}, or use another folder (HF_HOME moves the cache)",
        )
    if disk.free_bytes >= _LOW_DISK_BYTES:
        return ok(disk.purpose, found)
    return warning(
        disk.purpose,
        found,
        why="a checkpoint with optimizer states takes 12 to 14 bytes a parameter, twice that while an old "
        "one is kept",
        fix="free some, or use a folder on another disk (HF_HOME moves the cache)",
    )


def _check_port(limits: Limits) -> CheckupLine:
    topic = f"port {limits.port}"
    if limits.is_port_free:
        return ok(topic, "free")
    return warning(
        topic,
        "taken",
        why="another run may be on this node; plain accelerate launch fails on its default port then",
        fix="none needed for zerofit launch, which finds a free one; else pass --main_process_port",
    )


def _check_env_files(env_files: tuple[EnvFile, ...]) -> tuple[CheckupLine, ...]:
    if not env_files:
        return (ok(".deepspeed_env", "none"),)
    return tuple(_check_env_file(env_file) for env_file in env_files)


def _check_env_file(env_file: EnvFile) -> CheckupLine:
    readers = ", readable by all users" if env_file.is_readable_by_all else ""
    return warning(
        ".deepspeed_env",
        f"{env_file.path}, {env_file.num_variables} variables{readers}",
        why="a multi-node launch leaves the environment there, tokens included, and the next one exports it "
        "to every node",
        fix=f"rm {env_file.path}, unless you wrote it",
    )
