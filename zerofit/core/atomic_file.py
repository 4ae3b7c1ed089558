"""Writes a file whole or not at all: into a new file beside it, which then takes its place."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def write_whole(path: Path, content: str | bytes, *, mode: int = 0o666, sync: bool = False) -> None:
    """Write a file whole or not at all, in place of what was there; make its folder where it is missing.

    Two processes that write one file at once each write it whole; the later one stays.

    Args:
        path: the file.
        content: what it is to hold; text is written as UTF-8.
        mode: its permissions, before the process's umask.
        sync: wait until the content is on the disk, so that it survives a power failure.

    Raises:
        OSError: it can't be written.
    """
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
