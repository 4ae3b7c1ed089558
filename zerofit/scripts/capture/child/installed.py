"""Which files are installed ones: packages, Python's own and the system's, and which are a user's."""

from __future__ import annotations

import os
import site
import sysconfig
from pathlib import Path

_KINDS = ("purelib", "platlib", "stdlib", "platstdlib", "scripts")
"""Of sysconfig; its other ones name the whole prefix, below which a project may lie."""
_SYSTEM = (
    "/etc",
    "/bin",
    "/sbin",
    "/lib",
    "/usr/bin",
    "/usr/sbin",
    "/usr/lib",
    "/usr/share",
    "/usr/local/bin",
)
"""https://refspecs.linuxfoundation.org/FHS_3.0/fhs/index.html; /usr/src and /usr/local hold people's own."""
_ZEROFIT = str(Path(__file__).parents[2])


def installed_folders() -> tuple[str, ...]:
    """Return the folders of what is installed, each as it is named and as links lead to it."""
    paths = sysconfig.get_paths()
    named = {*(paths[kind] for kind in _KINDS), *site.getsitepackages(), *_SYSTEM, _ZEROFIT}
    if user := site.getusersitepackages():
        named.add(user)
    return tuple(sorted(named | {os.path.realpath(path) for path in named}))


def is_in(path: str, folder: str) -> bool:
    """Return whether a path is a folder, or lies in it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def innermost(path: str, folders: tuple[str, ...] | list[str]) -> int:
    """Return the length of the innermost of some folders that a path lies in; 0 for none."""
    return max((len(one) for one in folders if is_in(path, one)), default=0)
