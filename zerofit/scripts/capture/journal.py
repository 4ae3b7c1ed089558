"""The journal of a capture: the script's changes on disk, recorded beforehand.

The captured process writes it (child/files.py), its parent reads it. It is in the capture's own folder and
survives the process, however that ends.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """One change."""

    change: Change
    path: str
    """Absolute path."""
    copy: str = ""
    """KEPT: name of the copy in COPIES."""
    size: int = 0
    """Bytes before."""
    mtime_ns: int = 0
    mode: int = 0


def reset(folder: Path) -> None:
    """Clear the journal after it was undone."""
    for name in (_JOURNAL, _READ):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / COPIES, ignore_errors=True)


def last_written_ns(folder: Path) -> int:
    """Return when the journal or the output of a capture last grew, or its owner last checked it."""
    files = [folder / name for name in (LOG, _JOURNAL, _READ, SPEC)]
    return max((file.stat().st_mtime_ns for file in files if file.exists()), default=0)


def append(folder: Path, entry: JournalEntry) -> None:
    """Append an entry to a capture's journal; it survives this process when this returns."""
    _append(folder / _JOURNAL, asdict(entry))


def append_read(folder: Path, path: str) -> None:
    """Record that the script reads a file."""
    _append(folder / _READ, path)


def read_entries(folder: Path, *, offset: int = 0) -> tuple[list[JournalEntry], int]:
    """Return the entries of a journal from an offset on, and the offset of the next ones."""
    lines, offset = _lines(folder / _JOURNAL, offset)
    return [JournalEntry(**{**line, "change": Change(line["change"])}) for line in lines], offset


def is_of_hub(path: str) -> bool:
    """Return True if a file is in the hub's cache, which keeps what a script downloads.

    Source: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
    """
    return any(part in path for part in ("/refs/", "/blobs/", "/snapshots/"))


def read_paths(folder: Path) -> list[str]:
    """Return the files that the script read, without duplicates."""
    lines, _ = _lines(folder / _READ, 0)
    return sorted(set(lines))


def _append(file: Path, value: object) -> None:
    """Append one line atomically. The file is reopened each time: a script may close foreign descriptors."""
    number = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(number, (json.dumps(value) + "\n").encode())
    finally:
        os.close(number)


def _lines(file: Path, offset: int) -> tuple[list[Any], int]:
    try:
        with file.open("rb") as stream:
            stream.seek(offset)
            text = stream.read()
    except FileNotFoundError:
        return [], offset
    whole = text[: text.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines()], offset + len(whole)
