"""The journal of a capture: what the script was about to change on disk, noted before it did so.

The captured process writes it (child/files.py), the process that started it reads it. It lies in the
capture's own folder and is there however that process ended.
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
"""Why the script was ended before it did something that can't be undone; in the form of failure.json."""
LOG = "output.log"
"""The script's output."""
COPIES = "copies"
"""Folder of the files that were there before."""
_JOURNAL = "files.jsonl"
_READ = "read.jsonl"
MOST_READ = 5000
"""Files that are noted as read. ASSUMPTION: a script that reads more by now reads data, file by file."""


class Change(StrEnum):
    """A change to a path, written before it happens."""

    MADE = "made"
    """A file or a link where nothing was."""
    MADE_FOLDER = "made folder"
    KEPT = "kept"
    """A file's content, times or rights were about to change, and a copy was made."""
    REMOVED_FOLDER = "removed folder"
    """An empty folder was about to go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """One change."""

    change: Change
    path: str
    """Absolute."""
    copy: str = ""
    """KEPT: name of the copy in COPIES."""
    size: int = 0
    """Bytes before."""
    mtime_ns: int = 0
    mode: int = 0


def begin_anew(folder: Path) -> None:
    """Forget what the journal tells, once it is undone."""
    for name in (_JOURNAL, _READ):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / COPIES, ignore_errors=True)


def last_written_ns(folder: Path) -> int:
    """Return when the journal or the output of a capture last grew, or its owner last looked at it."""
    files = [folder / name for name in (LOG, _JOURNAL, _READ, SPEC)]
    return max((file.stat().st_mtime_ns for file in files if file.exists()), default=0)


def append(folder: Path, entry: JournalEntry) -> None:
    """Add an entry to a capture's journal; it is in the system's hands when this returns."""
    _append(folder / _JOURNAL, asdict(entry))


def append_read(folder: Path, path: str) -> None:
    """Note that the script reads a file."""
    _append(folder / _READ, path)


def read_entries(folder: Path, *, offset: int = 0) -> tuple[list[JournalEntry], int]:
    """Return the entries of a journal behind so many bytes, and where the next ones will begin."""
    lines, offset = _lines(folder / _JOURNAL, offset)
    return [JournalEntry(**{**line, "change": Change(line["change"])}) for line in lines], offset


def is_of_hub(path: str) -> bool:
    """True if a file is the hub cache's, which writes it while a script runs and then leaves it.

    Source: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
    """
    return any(part in path for part in ("/refs/", "/blobs/", "/snapshots/"))


def read_paths(folder: Path) -> list[str]:
    """Return the files that the script read, each once."""
    lines, _ = _lines(folder / _READ, 0)
    return sorted(set(lines))


def _append(file: Path, value: object) -> None:
    """Write one line in one piece. The file is opened each time: a script may close what it did not open."""
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
