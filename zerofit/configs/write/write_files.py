"""Writes files for the user atomically: none if one can't be written, never over one that differs."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from zerofit.core.atomic_file import write_whole
from zerofit.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def write_files(
    files: Mapping[Path, str], *, force: bool, flag: str = "--output-dir DIR", is_private: bool = False
) -> None:
    """Write the files, creating their folders.

    Args:
        files: text by path.
        force: overwrite files that differ.
        flag: the flag that names the place.
        is_private: make them readable only by their owner.

    Raises:
        UserError: a file exists and differs (nothing is written then), or a folder is not writable.
    """
    try:
        same = {path for path, text in files.items() if path.exists() and path.read_bytes() == text.encode()}
        differing = [path for path in files if path.exists() and path not in same]
        if differing and not force:
            raise file_exists(", ".join(map(str, differing)), flag=flag)
        _write({path: text for path, text in files.items() if path not in same}, is_private=is_private)
    except OSError as error:
        raise not_writable(f"{error.strerror}: {error.filename}", flag=flag) from None


def check_can_write(path: Path, *, force: bool, flag: str) -> None:
    """Check that a file can be written later, in a folder that exists or can be created.

    Args:
        path: the file.
        force: whether it may overwrite an existing file.
        flag: the flag that names it.

    Raises:
        UserError: the file exists, or its folder is not writable.
    """
    if path.is_dir():
        raise not_writable(f"{os.strerror(errno.EISDIR)}: {path}", flag=flag)
    if path.exists() and not force:
        raise file_exists(str(path), flag=flag)
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise not_writable(f"{os.strerror(errno.ENOTDIR)}: {folder}", flag=flag)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise not_writable(f"{os.strerror(errno.EACCES)}: {folder}", flag=flag)


def write_bytes(path: Path, content: bytes, *, flag: str) -> None:
    """Write a file atomically, creating its folder, over an existing one.

    Raises:
        UserError: the folder is not writable.
    """
    try:
        write_whole(path, content)
    except OSError as error:
        raise not_writable(f"{error.strerror}: {path}", flag=flag) from None


def not_writable(found: str, *, flag: str, what: str = "file") -> UserError:
    """Return the error for a file or folder that can't be written.

    Args:
        found: the system's message, and the path.
        flag: the flag that names the place.
        what: "file" or "folder".
    """
    return UserError(
        "not-writable",
        f"a {what} can't be written",
        found=found,
        why="the folder or file is not writable",
        fix=f"name a writable folder: {flag}",
    )


def file_exists(found: str, *, flag: str) -> UserError:
    """Return the error for files that would be overwritten.

    Args:
        found: their names.
        flag: the flag that names the place.
    """
    return UserError(
        "file-exists",
        "the file exists and differs",
        found=found,
        why="it may contain your work",
        fix=f"write elsewhere with {flag}, or overwrite with --force",
    )


def _write(files: Mapping[Path, str], *, is_private: bool) -> None:
    """Write all texts to temporary files, then rename: errors occur before any file is replaced."""
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
