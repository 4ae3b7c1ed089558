"""Folders whose files other processes remove while they are read: caches, checkpoints, folders of runs."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def statuses(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield a folder and everything below it, each with its status; what has vanished is left out.

    A link below it has its own status, and is not followed.
    """
    with contextlib.suppress(OSError):
        yield folder, folder.stat()
    for at, folders, names in os.walk(folder):  # unlike Path.rglob(), no error for a folder that has gone
        for name in (*folders, *names):
            path = Path(at, name)
            try:
                status = path.lstat()
            except OSError:
                continue
            yield path, status


def last_change(folder: Path) -> float:
    """Return when a folder, or anything below it, last changed, as time.time(); 0 if it has vanished."""
    return max((status.st_mtime for _, status in statuses(folder)), default=0.0)


def remove_oldest(
    folder: Path, suffix: str, *, most_files: int | None = None, most_bytes: int | None = None
) -> None:
    """Remove the oldest files of a folder above a number, or above a size that they have together.

    Args:
        folder: of a cache, which others may prune too.
        suffix: of the files that count.
        most_files: how many are kept; None for any number.
        most_bytes: how many bytes are kept; None for any number.
    """
    found = [(status.st_mtime_ns, path, status.st_size) for path, status in statuses(folder)]
    found = [entry for entry in found if entry[1].parent == folder and entry[1].suffix == suffix]
    total_bytes = 0
    for number, (_, path, num_bytes) in enumerate(sorted(found, reverse=True), start=1):
        total_bytes += num_bytes
        is_above = most_files is not None and number > most_files
        if is_above or (most_bytes is not None and total_bytes > most_bytes):
            with contextlib.suppress(OSError):
                path.unlink()
