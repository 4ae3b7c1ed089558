"""Atomic file writes: to a temporary file in the same folder, then renamed."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def write_whole(path: Path, content: str | bytes, *, mode: int = 0o666, sync: bool = False) -> None:
    """Write a file atomically, creating its folder if needed.

    Of two processes writing the same file at once, the last one wins; the file is never mixed.

    Args:
        path: the file.
        content: text is written as UTF-8.
        mode: its permissions, before the process's umask.
        sync: fsync, so that the content survives a power failure.
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
