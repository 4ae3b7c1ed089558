"""The folder of one capture, and what is done about one whose zerofit was killed before it could clear up."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

from zerofit.core.errors import UserError
from zerofit.scripts.capture.journal import begin_anew, last_written_ns
from zerofit.scripts.capture.process import end_marked
from zerofit.scripts.capture.restore_files import undo

if TYPE_CHECKING:
    from zerofit.scripts.capture.restore_files import Undone

_FOLDERS = "capturing"
_KEPT = "kept"
"""Folder of captures whose copies are the user's to look at, as a file has changed since."""
_OWNER = "owner.json"
"""Which machine a capture runs on; locked for as long as it does."""
_TEMPORARY = "temporary"
"""Names the folder for the script's temporary files."""
_PREFIX = "zerofit-"
_MOST_CHARACTERS = 60
"""Of a folder for temporary files, sockets among them: 108 are there for their path (unix(7)), of which
multiprocessing takes 33 (multiprocessing/connection.py, arbitrary_address). ASSUMPTION: others take less."""


class CaptureFolder:
    """A new folder for a capture, which nobody else can read, locked until it is cleared.

    It lies in zerofit's cache folder, where copies of the user's files outlive a restart and take no memory
    as they may in /tmp; in /tmp where there is none, or none that can be written to.
    """

    path: Path
    temporary: Path
    """For the script's temporary files; in `path` unless that is too long for sockets."""

    def __init__(self, cache_folder: Path | None) -> None:
        made = None
        if cache_folder is not None:
            with contextlib.suppress(OSError):
                (cache_folder / _FOLDERS).mkdir(parents=True, exist_ok=True)
                made = tempfile.mkdtemp(prefix="", dir=cache_folder / _FOLDERS)
        self.path = Path(os.path.realpath(made or tempfile.mkdtemp(prefix=_PREFIX)))
        self._owner = (self.path / _OWNER).open("w+", encoding="utf-8")
        with contextlib.suppress(OSError):  # a file system without locks: then it counts as alive for good
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        json.dump(_machine(), self._owner)
        self._owner.flush()
        self.temporary = self.path / "t"
        if len(str(self.temporary)) > _MOST_CHARACTERS:
            self.temporary = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self.temporary.mkdir(exist_ok=True)
        (self.path / _TEMPORARY).write_text(str(self.temporary), encoding="utf-8")

    def begin_anew(self, *, ended_ns: int) -> None:
        """Put the user's files back, and make the folder as new; the last process ended at that time.

        Raises:
            UserError: a file could not be put back.
        """
        undone = _undo(self.path, ended_ns)
        if not (undone.newer or undone.left):
            begin_anew(self.path)

    def clear(self, *, ended_ns: int) -> tuple[str, ...]:
        """Put the user's files back, remove the folder, and return sentences on what is left.

        Raises:
            UserError: a file could not be put back; the folder with its copy stays.
        """
        with self._owner:
            undone = _undo(self.path, ended_ns)
            told = _told(self.path, undone)
            if undone.newer:
                keep(self.path)
            else:
                _remove(self.path)
            return told


def clear_leftovers(cache_folder: Path) -> dict[Path, tuple[str, ...]]:
    """Put the user's files back for every capture whose zerofit is gone, and end what is left of it.

    Returns:
        Sentences on what is left, by the capture's folder; one that is still there holds copies of files
        that were changed since, and is looked at again unless keep() is called with it.

    Raises:
        UserError: a file could not be put back.
    """
    told = {}
    for folder in (cache_folder / _FOLDERS).glob("*"):
        owner = _lock_of_the_dead(folder)
        if owner is not None:
            with owner:
                end_marked(str(folder))
                undone = _undo(folder, last_written_ns(folder))
                told[folder] = _told(folder, undone)
                if not undone.newer:
                    _remove(folder)
    return told


def keep(folder: Path) -> None:
    """Put a folder with copies that its user was told of where no later zerofit looks at it."""
    kept = _kept(folder)
    if folder.exists() and kept != folder:
        kept.parent.mkdir(exist_ok=True)
        folder.rename(kept)


def _lock_of_the_dead(folder: Path) -> IO[str] | None:
    """Return the locked file of a capture whose owner is gone; None where it may live, be it elsewhere.

    Two things tell, as each has gaps: the lock, which some shared file systems keep on each machine for
    itself, and the machine, whose name may be that of several.
    """
    try:
        file = (folder / _OWNER).open("r+", encoding="utf-8")
    except OSError:  # it is being made, or cleared
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        owner, here = json.load(file), _machine()
        if owner["boot"] == here["boot"] or owner["host"] == here["host"]:
            return file
    except (OSError, ValueError, KeyError, TypeError):
        pass
    file.close()
    return None


def _machine() -> dict[str, str]:
    """Return what names this machine and its run since it was started: containers on it share the latter."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return {"host": socket.gethostname(), "boot": boot}


def _undo(folder: Path, ended_ns: int) -> Undone:
    undone = undo(folder, ended_ns=ended_ns)
    if undone.lost:
        raise UserError(
            "capture-files-changed",
            "files that the script overwrote could not be put back",
            found="\n         ".join(undone.lost),
            why="zerofit ran the beginning of the script, and kept copies of what it overwrote",
            fix="make them writable, or room on the disk, and copy them back",
        )
    return undone


def _told(folder: Path, undone: Undone) -> tuple[str, ...]:
    made = [f"{path} was made on the way, and is left as it holds files" for path in undone.left]
    newer = [
        f"{path} was written on the way and again since, and is left as it is; what was kept of it is in "
        f"{_kept(folder)}"
        for path in undone.newer
    ]
    return (*made, *newer)


def _kept(folder: Path) -> Path:
    return folder.parent.parent / _KEPT / folder.name if folder.parent.name == _FOLDERS else folder


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError):
        temporary = Path((folder / _TEMPORARY).read_text(encoding="utf-8"))
        if temporary.name.startswith(_PREFIX) and temporary.parent == Path(tempfile.gettempdir()):
            shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
