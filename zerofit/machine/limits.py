"""Limits of this node that a run may hit: locked and shared memory, disk space, port, .deepspeed_env."""

from __future__ import annotations

import os
import resource
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.machine.port import DEFAULT_PORT, is_port_free
from zerofit.machine.this_node import read_meminfo
from zerofit.machine.toolchain import Disk, EnvFile, Limits

if TYPE_CHECKING:
    from collections.abc import Mapping

_CAP_IPC_LOCK = 14
"""Bit of the capability that lifts the limit on locked memory (capabilities(7))."""


def probe_limits(*, folder: Path, home: Path, environ: Mapping[str, str], root: Path = Path("/")) -> Limits:
    """Return the limits of this node for a run started in the folder.

    Args:
        folder: where the run would start.
        home: the user's home folder.
        environ: the environment.
        root: the file-system root for /proc and /dev.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    shm = root / "dev/shm"
    return Limits(
        installed_memory_bytes=read_meminfo("MemTotal", root=root),
        memlock_bytes=None if may_lock_all_memory(root=root) else _memlock_limit(),
        shm_bytes=shutil.disk_usage(shm).total if shm.is_dir() else None,
        disks=(
            probe_disk("current folder", folder),
            probe_disk("Hugging Face cache", Path(HF_HUB_CACHE)),
        ),
        port=DEFAULT_PORT,
        is_port_free=is_port_free(DEFAULT_PORT),
        env_files=find_env_files(folder=folder, home=home, environ=environ),
    )


def may_lock_all_memory(*, root: Path = Path("/")) -> bool:
    """Return True if this process has CAP_IPC_LOCK outside any user namespace, where it takes effect.

    Args:
        root: the file-system root.
    """
    try:
        status = (root / "proc/self/status").read_text()
        uid_map = (root / "proc/self/uid_map").read_text().split()
    except OSError:
        return False
    capabilities = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    is_initial_namespace = uid_map == ["0", "0", str(2**32 - 1)]
    return is_initial_namespace and bool(int(capabilities, 16) >> _CAP_IPC_LOCK & 1)


def probe_disk(purpose: str, folder: Path) -> Disk:
    """Return the free space in the folder, or in its nearest existing parent."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    return Disk(
        purpose=purpose,
        folder=str(folder),
        free_bytes=shutil.disk_usage(there).free,
        is_writable=os.access(there, os.W_OK),
    )


def find_env_files(*, folder: Path, home: Path, environ: Mapping[str, str]) -> tuple[EnvFile, ...]:
    """Return the environment files that a DeepSpeed launcher started in the folder would read.

    Source: deepspeed/launcher/runner.py, DEEPSPEED_ENVIRONMENT_PATHS. Values are not read.

    Args:
        folder: where the run would start.
        home: the user's home folder.
        environ: the environment.
    """
    name = environ.get("DS_ENV_FILE", ".deepspeed_env")
    paths = dict.fromkeys(place / name for place in (home, folder))
    return tuple(_env_file(path) for path in paths if path.is_file())


def _env_file(path: Path) -> EnvFile:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    return EnvFile(
        path=str(path),
        num_variables=len({line.partition("=")[0] for line in lines if "=" in line}),
        is_readable_by_all=bool(path.stat().st_mode & stat.S_IROTH),
    )


def _memlock_limit() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft
