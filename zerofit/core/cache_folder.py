"""The folder that zerofit keeps measurements and traces in, and the one way in which files get there."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def cache_folder(environment: Mapping[str, str], home: Path) -> Path:
    """Return the folder zerofit under XDG_CACHE_HOME, or under ~/.cache.

    A relative XDG_CACHE_HOME counts as none. Source: https://specifications.freedesktop.org/basedir/latest/

    Args:
        environment: the process's variables.
        home: the user's folder.
    """
    caches = environment.get("XDG_CACHE_HOME", "")
    return (Path(caches) if os.path.isabs(caches) else home / ".cache") / "zerofit"


def write_whole(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write a file whole or not at all, in place of what was there; make its folder where it is missing.

    Two processes that write one file at once each write it whole; the later one stays.

    Args:
        path: the file.
        data: what it is to hold.
        mode: its rights, less what the process's mask takes.

    Raises:
        OSError: it can't be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    try:
        number = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(number, "wb") as file:
            file.write(data)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
