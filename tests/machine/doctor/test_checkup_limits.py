"""Verdicts on memory, disk, port and left-over files, whole messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from zerofit.core.units import GIB, MIB
from zerofit.machine.toolchain import Disk, EnvFile

_DISK = Disk(purpose="current folder", folder="/home/me/run", free_bytes=900 * GIB, is_writable=True)


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        pytest.param(
            {"host_memory_available_bytes": 2 * GIB},
            (
                "host memory",
                "512.0 GiB, 2.0 GiB free",
                "ranks that load a model or offload to CPU are killed (exit -9) when it runs out",
                "end other processes",
            ),
            id="host memory taken",
        ),
        pytest.param(
            {"host_memory_bytes": 3 * GIB, "host_memory_available_bytes": 2 * GIB},
            (
                "host memory",
                "3.0 GiB, 2.0 GiB free; limited by the cgroup, 512.0 GiB installed",
                "ranks that load a model or offload to CPU are killed (exit -9) when it runs out",
                "raise the memory of the container or job",
            ),
            id="cgroup too small",
        ),
        pytest.param(
            {"memlock_bytes": 8 * MIB},
            (
                "memlock",
                "8.0 MiB",
                "buffers of NVMe offload, and any pinned ones under DS_PIN_MEMORY_BACKEND=native, are locked "
                "in memory",
                "ulimit -l unlimited (containers: --ulimit memlock=-1), or offload with pin_memory false",
            ),
            id="memlock small",
        ),
        pytest.param(
            {"shm_bytes": 64 * MIB},
            (
                "/dev/shm",
                "64.0 MiB",
                "NCCL between the ranks and DataLoader workers pass data through it, and die of bus errors "
                "when it is full",
                "start the container with --shm-size=8g or --ipc=host (Kubernetes: a Memory emptyDir there)",
            ),
            id="docker's default /dev/shm",
        ),
        pytest.param(
            {"disks": (replace(_DISK, free_bytes=GIB),)},
            (
                "current folder",
                "1.0 GiB free in /home/me/run",
                "a checkpoint with optimizer states takes 12 to 14 bytes a parameter, twice that while an "
                "old one is kept",
                "free some, or use a folder on another disk (HF_HOME moves the cache)",
            ),
            id="disk nearly full",
        ),
        pytest.param(
            {
                "disks": (
                    replace(_DISK, purpose="Hugging Face cache", folder="/data/hf/hub", is_writable=False),
                )
            },
            (
                "Hugging Face cache",
                "/data/hf/hub is not writable",
                "checkpoints, run folders and downloads can't be written",
                "chmod u+w /data/hf/hub, or use another folder (HF_HOME moves the cache)",
            ),
            id="folder not writable",
        ),
        pytest.param(
            {"is_port_free": False},
            (
                "port 29500",
                "taken",
                "another run may be on this node; plain accelerate launch fails on its default port then",
                "none needed for zerofit launch, which finds a free one; else pass --main_process_port",
            ),
            id="port taken",
        ),
        pytest.param(
            {"env_files": (EnvFile(path="./.deepspeed_env", num_variables=42, is_readable_by_all=True),)},
            (
                ".deepspeed_env",
                "./.deepspeed_env, 42 variables, readable by all users",
                "a multi-node launch leaves the environment there, tokens included, and the next one exports "
                "it to every node",
                "rm ./.deepspeed_env, unless you wrote it",
            ),
            id="environment left behind",
        ),
    ],
)
def test_one_thing_amiss_is_one_warning(
    warnings: Callable[..., list[Any]], changes: dict[str, Any], warning: tuple[str, str, str, str]
) -> None:
    assert warnings(**changes) == [warning]
