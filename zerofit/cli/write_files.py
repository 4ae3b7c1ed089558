"""Writes files for the user: each whole, none where one can't be written, never over one that differs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from zerofit.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def write_files(
    files: Mapping[Path, str], *, force: bool, flag: str = "--output-dir DIR", is_private: bool = False
) -> None:
    """Write the files, making their folders.

    Args:
        files: text by path.
        force: whether to write over files that differ.
        flag: what says where to write.
        is_private: whether only their owner may read them.

    Raises:
        UserError: a file is there and differs (nothing is written then), or a folder can't be written.
    """
    try:
        same = {path for path, text in files.items() if path.exists() and path.read_bytes() == text.encode()}
        differing = [path for path in files if path.exists() and path not in same]
        if differing and not force:
            raise file_exists(", ".join(map(str, differing)), flag=flag)
        _write({path: text for path, text in files.items() if path not in same}, is_private=is_private)
    except OSError as error:
        raise UserError(
            "not-writable",
            "a file can't be written",
            found=f"{error.strerror}: {error.filename}",
            why="the folder or the file does not allow it",
            fix=f"name a folder that can be written: {flag}",
        ) from None


def file_exists(found: str, *, flag: str) -> UserError:
    """Return what is said where files would be written over.

    Args:
        found: their names.
        flag: what says where to write.
    """
    return UserError(
        "file-exists",
        "a file of that name is there and differs",
        found=found,
        why="it may hold work of yours",
        fix=f"write elsewhere with {flag}, or overwrite with --force",
    )


def _write(files: Mapping[Path, str], *, is_private: bool) -> None:
    """Write all texts beside their files, then rename: what fails, fails before a file is replaced."""
    partials: dict[Path, Path] = {}
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}.partial")
            with partial.open("w", encoding="utf-8") as file:
                partials[partial] = path
                if is_private:
                    partial.chmod(0o600)
                file.write(text)
            if text.startswith("#!"):
                partial.chmod(0o755)
        for partial, path in partials.items():
            os.replace(partial, path)
    finally:
        for partial in partials:
            partial.unlink(missing_ok=True)
