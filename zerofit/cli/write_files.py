"""Writes files for the user: all or none, each whole, never over something that differs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from zerofit.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def write_files(files: Mapping[Path, str], *, force: bool) -> None:
    """Write the files, making their folders.

    Args:
        files: text by path.
        force: whether to write over files that differ.

    Raises:
        UserError: a file is there and differs (nothing is written then), or a folder can't be written.
    """
    try:
        same = {path for path, text in files.items() if path.exists() and path.read_bytes() == text.encode()}
        differing = [path for path in files if path.exists() and path not in same]
        if differing and not force:
            raise UserError(
                "file-exists",
                "a file of that name is there and differs",
                found=", ".join(map(str, differing)),
                why="it may hold work of yours",
                fix="write elsewhere with --output-dir DIR, or overwrite with --force",
            )
        for path, text in files.items():
            if path not in same:
                path.parent.mkdir(parents=True, exist_ok=True)
                _write(path, text)
    except OSError as error:
        raise UserError(
            "not-writable",
            "a file can't be written",
            found=f"{error.strerror}: {error.filename}",
            why="the folder or the file does not allow it",
            fix="name a folder that can be written: --output-dir DIR",
        ) from None


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    if text.startswith("#!"):
        partial.chmod(0o755)
    os.replace(partial, path)
