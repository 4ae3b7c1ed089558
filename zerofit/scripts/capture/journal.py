"""The journal of a capture: the script's changes on disk, recorded beforehand.

The captured process writes it (child/files.py), its parent reads it. It is in the capture's own folder and
survives the process, however that ends.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from zerofit.core.bounded_read import open_regular

SPEC = "spec.json"
"""The request to the captured process."""
CAPTURE = "capture.json"
FAILURE = "failure.json"
REFUSED = "refused.json"
"""Why the script was ended before an irreversible change; in the format of failure.json."""
LOG = "output.log"
"""The script's output."""
COPIES = "copies"
"""Folder with copies of changed files."""
UNCONFINED = "unconfined"
"""Exists if compiled code could write somewhere in the user's folders."""
_JOURNAL = "files.jsonl"
_READ = "read.jsonl"
MAX_FILES_READ = 5000
"""Maximum number of read files recorded. ASSUMPTION: a script that reads more is reading data, file by
file."""


class Change(StrEnum):
    """A change to a path, recorded before it happens."""

    MADE = "made"
    """A new file or link."""
    MADE_FOLDER = "made folder"
    KEPT = "kept"
    """A file whose content, times or permissions were about to change was copied."""
    REMOVED_FOLDER = "removed folder"
    """An empty folder was about to be removed."""
    REPLACED = "replaced"
    """A file that another one was about to replace was kept as a hard link."""
    TOUCHED = "touched"
    """Times, permissions or owner of a file or folder were about to change."""
    MADE_CACHE = "made cache"
    """The folder of a cache, which stays unless it is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """What tells whether a file is as it was."""

    size: int = 0
    mtime_ns: int = 0
    inode: int = 0
    mode: int = 0
    user: int = 0
    group: int = 0
    ctime_ns: int = 0
    """When anything of it last changed; never put back."""

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: one is none.
        """
        numbers = (self.size, self.mtime_ns, self.inode, self.mode, self.user, self.group, self.ctime_ns)
        if not all(type(number) is int and abs(number) < 2**64 for number in numbers):
            raise ValueError(f"{numbers} is no stamp")


def stamp_of(status: os.stat_result) -> Stamp:
    """Return the stamp of a file; a folder's size and time tell of its contents, and are left out."""
    is_folder = stat.S_ISDIR(status.st_mode)
    return Stamp(
        size=0 if is_folder else status.st_size,
        mtime_ns=status.st_mtime_ns,
        inode=status.st_ino,
        mode=stat.S_IMODE(status.st_mode),
        user=status.st_uid,
        group=status.st_gid,
        ctime_ns=status.st_ctime_ns,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """One change."""

    change: Change
    path: str
    """Absolute path."""
    copy: str = ""
    """KEPT: name of the copy in COPIES; REPLACED: of the hard link."""
    stamp: Stamp = field(default_factory=Stamp)
    """The file's before; that of what was not there is all zeros."""

    def __post_init__(self) -> None:
        """Check the paths.

        Raises:
            ValueError: one can't be in a journal.
        """
        if not isinstance(self.path, str) or not isinstance(self.copy, str):
            raise ValueError("path and copy must be texts")
        if not os.path.isabs(self.path) or "\0" in self.path:
            raise ValueError(f"path: {self.path!r} is not absolute")
        if os.path.basename(self.copy) != self.copy or "\0" in self.copy:
            raise ValueError(f"copy: {self.copy!r} is no name")


def reset(folder: Path) -> None:
    """Clear the journal after it was undone."""
    for name in (_JOURNAL, _READ, UNCONFINED):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / COPIES, ignore_errors=True)


def last_written_ns(folder: Path) -> int:
    """Return when the journal or the output of a capture last grew, or its owner last checked it."""
    files = [folder / name for name in (LOG, _JOURNAL, _READ, SPEC)]
    return max((file.stat().st_mtime_ns for file in files if file.exists()), default=0)


def append(folder: Path, entry: JournalEntry) -> None:
    """Append an entry to a capture's journal; it survives this process when this returns."""
    _append(folder / _JOURNAL, asdict(entry))


def append_read(folder: Path, path: str, stamp: Stamp) -> None:
    """Record that the script reads a file."""
    _append(folder / _READ, [path, asdict(stamp)])


def read_entries(folder: Path, *, offset: int = 0) -> tuple[list[JournalEntry], int]:
    """Return the entries of a journal from an offset on, and the offset of the next ones.

    Damaged lines are left out; `is_damaged` tells if there are some.
    """
    lines, offset = _lines(folder / _JOURNAL, offset)
    entries = (_entry_in(line) for line in lines)
    return [entry for entry in entries if entry is not None], offset


def is_damaged(folder: Path) -> bool:
    """Return True if a journal has lines that can't be read, so that it is unknown what they were about."""
    return any(_entry_in(line) is None for line in _lines(folder / _JOURNAL, 0)[0])


def _entry_in(line: str) -> JournalEntry | None:
    try:  # json takes names that are not UTF-8, which pydantic refuses
        fields = json.loads(line)
        stamp = Stamp(**fields["stamp"])
        return JournalEntry(**{**fields, "change": Change(fields["change"]), "stamp": stamp})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def is_of_hub(path: str) -> bool:
    """Return True if a file is in the hub's cache, which keeps what a script downloads.

    Source: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
    """
    return any(part in path for part in ("/refs/", "/blobs/", "/snapshots/"))


def read_paths(folder: Path) -> dict[str, Stamp]:
    """Return the files that the script read, and the stamp of each when it was first read."""
    lines, _ = _lines(folder / _READ, 0)
    found: dict[str, Stamp] = {}
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            path, stamp = json.loads(line)
            found.setdefault(os.fspath(path), Stamp(**stamp))
    return found


def _append(file: Path, value: object) -> None:
    """Append one line atomically. The file is reopened each time: a script may close foreign descriptors."""
    number = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        line = (json.dumps(value) + "\n").encode()
        written = os.write(number, line)
        if written < len(line):  # the disk is full: a part of a line would spoil the next one
            os.ftruncate(number, os.fstat(number).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
    finally:
        os.close(number)


def _lines(file: Path, offset: int) -> tuple[list[str], int]:
    try:
        with open_regular(file) as stream:
            stream.seek(offset)
            text = stream.read()
    except FileNotFoundError:
        return [], offset
    except OSError:  # no file: a line that can't be read
        return [""], offset
    whole = text[: text.rfind(b"\n") + 1]
    return whole.decode(errors="replace").splitlines(), offset + len(whole)
