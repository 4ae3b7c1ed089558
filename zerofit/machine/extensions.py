"""torch's extensions folder, where DeepSpeed's ops are compiled: compiled ops and build locks."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.machine.toolchain import BuildLock

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_ABANDONED_S = 600
"""ASSUMPTION: a build on another node with the same home folder takes 1 to 2 minutes, no longer than this."""


def extensions_folders(
    *, environ: Mapping[str, str], home: Path, cuda_version: tuple[int, int] | None
) -> tuple[Path, Path]:
    """Return (the folder of all builds, the one in it that this Python and torch build into).

    Source: torch/utils/cpp_extension.py, _get_build_directory. Calling torch would create the folder.

    Args:
        environ: the environment.
        home: the user's home folder.
        cuda_version: torch's CUDA version, or None for a build without CUDA.
    """
    if explicit := environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(explicit), Path(explicit)
    top = Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "torch_extensions"
    accelerator = f"cu{cuda_version[0]}{cuda_version[1]}" if cuda_version else "cpu"
    python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    return top, top / f"{python}_{accelerator}"


def is_op_compiled(name: str, *, folder: Path) -> bool:
    """Return True if the folder has a compiled op of this name; rebuilt ones are called name_v1.so."""
    return any((folder / name).glob(f"{name}*.so"))


def ops_to_compile(names: Iterable[str], *, environ: Mapping[str, str], home: Path) -> tuple[str, ...]:
    """Return those of DeepSpeed's ops that this Python has not compiled yet, for any CUDA version.

    Args:
        names: of ops.
        environ: the environment.
        home: the user's home folder.
    """
    top, folder = extensions_folders(environ=environ, home=home, cuda_version=None)
    folders = [folder, *top.glob(f"{folder.name.removesuffix('cpu')}*")]
    return tuple(name for name in names if not any(is_op_compiled(name, folder=place) for place in folders))


def find_build_locks(top: Path, *, proc: Path = Path("/proc")) -> tuple[BuildLock, ...]:
    """Return every lock in torch's extensions folder, and whether a build still holds it.

    torch keeps its lock open while it builds (torch/utils/file_baton.py), so a lock that no process has open
    is left over from a killed build; later builds wait for it forever.

    Args:
        top: the folder of all builds.
        proc: the folder of the processes.
    """
    # TORCH_EXTENSIONS_DIR contains the ops directly; the default folder has a subfolder per Python and CUDA.
    locks = sorted(path for pattern in ("*/lock", "*/*/lock") for path in top.glob(pattern))
    open_files = _open_files(proc) if locks else frozenset()
    found = []
    for lock in locks:
        with contextlib.suppress(FileNotFoundError):  # its build has ended since
            age_s = max(0.0, time.time() - lock.stat().st_mtime)
            is_held = str(lock.resolve()) in open_files
            found.append(BuildLock(path=str(lock), age_s=age_s, is_held=is_held))
    return tuple(found)


def sign_lock(lock: Path) -> None:
    """Write into a lock that torch has just made which processes can see whether it is held.

    A lock is empty otherwise, and may be another node's.
    """
    with contextlib.suppress(OSError):
        lock.write_text(_signature(), encoding="utf-8")


def _signature() -> str:
    """Return what names the processes whose open files this one can list: this user's in this container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"zerofit {boot} {os.readlink('/proc/self/ns/pid')} uid {os.getuid()}\n"


def _is_signed_here(lock: Path) -> bool:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return lock.read_text(encoding="utf-8") == _signature()
    return False


def clear_abandoned_locks(
    *, environ: Mapping[str, str], home: Path, are_signed: bool = False
) -> Iterator[str]:
    """Remove locks left over from killed builds, and yield a sentence for each.

    Args:
        environ: the environment.
        home: the user's home folder.
        are_signed: look only at locks of runs of zerofit on this machine.
    """
    top, _ = extensions_folders(environ=environ, home=home, cuda_version=None)
    for lock in find_build_locks(top):
        is_signed = _is_signed_here(Path(lock.path))
        if lock.is_held or (are_signed and not is_signed):
            continue
        if lock.age_s < _ABANDONED_S and not is_signed:
            yield (
                f"no process here holds {lock.path}; if none does on another node, this run waits for it "
                f"forever: rm {lock.path}"
            )
        else:
            Path(lock.path).unlink(missing_ok=True)
            made_by = "a run of zerofit here" if is_signed else "torch"
            yield (
                f"removed {lock.path}: {made_by} made it {_age(lock.age_s)} ago while it compiled, and no "
                "process has it open, so that build was killed; runs would wait for it forever"
            )


def _age(seconds: float) -> str:
    """Return an age in its largest unit: "3 days", "25 minutes"."""
    for unit, length in (("day", 86400), ("hour", 3600)):
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit}s"
    return f"{seconds // 60:.0f} minutes"


def _open_files(proc: Path) -> frozenset[str]:
    """Return the files that this user's processes have open."""
    files: set[str] = set()
    for folder in proc.glob("[0-9]*/fd"):
        try:
            files.update(str(link.readlink()) for link in folder.iterdir())
        except OSError:
            # Another user's process, or one that has just ended.
            continue
    return frozenset(files)
