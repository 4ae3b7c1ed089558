"""Writes files for the user: each whole, none where one can't be written, never over one that differs."""

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
        raise not_writable(f"{error.strerror}: {error.filename}", flag=flag) from None


def check_can_write(path: Path, *, force: bool, flag: str) -> None:
    """Return where a file can be written later, in a folder that is there or can be made.

    Args:
        path: the file.
        force: whether to write over one that is there.
        flag: what named it.

    Raises:
        UserError: a file is there, or its folder can't be written.
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
    """Write a file whole, making its folder, over one that is there.

    Raises:
        UserError: the folder can't be written.
    """
    try:
        write_whole(path, content)
    except OSError as error:
        raise not_writable(f"{error.strerror}: {path}", flag=flag) from None


def not_writable(found: str, *, flag: str) -> UserError:
    """Return what is said where a file can't be written.

    Args:
        found: what the system says, and the path.
        flag: what says where to write.
    """
    return UserError(
        "not-writable",
        "a file can't be written",
        found=found,
        why="the folder or the file does not allow it",
        fix=f"name a folder that can be written: {flag}",
    )


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
