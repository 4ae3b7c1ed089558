"""The folder of a capture, and recovery of those whose zerofit was killed before cleaning up."""

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
from zerofit.scripts.capture.journal import is_damaged, last_written_ns, reset
from zerofit.scripts.capture.process import kill_marked
from zerofit.scripts.capture.restore_files import undo, unseen_changes

if TYPE_CHECKING:
    from zerofit.scripts.capture.restore_files import UndoResult

_FOLDERS = "capturing"
_KEPT = "kept"
"""Folder of captures with copies that the user must inspect, since a file has changed after the capture."""
_OWNER = "owner.json"
"""File with the capture's machine; locked while the capture runs."""
_TEMPORARY = "temporary"
"""Name of the folder for the script's temporary files."""
_PREFIX = "zerofit-"
_NUM_NAMED = 3
"""Number of restored files that are named."""
_ROOM_BYTES = 1 << 16
"""Room that a capture needs to say how it ended. ASSUMPTION: its result is smaller."""
_MAX_CHARACTERS = 60
"""Maximum path length of a temporary folder that may contain sockets: their paths may have 108 characters
(unix(7)), of which multiprocessing uses 33 (multiprocessing/connection.py, arbitrary_address). ASSUMPTION:
others use less."""


class CaptureFolder:
    """A new private folder for a capture, locked until it is cleared.

    It is in zerofit's cache folder, where copies of the user's files survive a reboot and take no memory,
    unlike in /tmp; or in /tmp if that folder is not writable, or full.
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
                if why_full(Path(made)):
                    os.rmdir(made)
                    made = None
        self.path = Path(os.path.realpath(made or tempfile.mkdtemp(prefix=_PREFIX)))
        self._owner = (self.path / _OWNER).open("w+", encoding="utf-8")
        with contextlib.suppress(OSError):  # a file system without locks: then it always counts as alive
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        json.dump(_machine(), self._owner)
        self._owner.flush()
        self.temporary = self.path / "t"
        if len(str(self.temporary)) > _MAX_CHARACTERS:
            self.temporary = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self.temporary.mkdir(exist_ok=True)
        (self.path / _TEMPORARY).write_text(str(self.temporary), encoding="utf-8")

    @property
    def lock(self) -> int:
        """The descriptor of the lock; the folder stays locked while any process has it open."""
        return self._owner.fileno()

    def reset(self, *, ended_ns: int) -> None:
        """Restore the user's files, and reset the folder; the last process ended at that time.

        Raises:
            UserError: a file could not be restored.
        """
        undone = _undo(self.path, ended_ns)
        if not (undone.newer or undone.left):
            reset(self.path)

    def clear(self, *, ended_ns: int) -> tuple[str, ...]:
        """Restore the user's files, remove the folder, and return sentences on what was restored or is left.

        Raises:
            UserError: a file could not be restored, and the folder with its copy is kept; or a file differs
                that the script was not seen to change.
        """
        with self._owner:
            undone = _undo(self.path, ended_ns)
            told = (*_restored_words(undone), *_leftover_words(self.path, undone))
            unseen = unseen_changes(self.path, ended_ns=ended_ns)
            if undone.newer:
                keep(self.path)
            else:
                _remove(self.path)
        if unseen:
            raise UserError(
                "capture-changed-unseen",
                "files changed while the script was captured, and zerofit did not see how",
                found="\n         ".join(unseen),
                why="zerofit restores what it sees a script do, and this kernel does not keep compiled code "
                "from doing more (Landlock, Linux 5.19 and later)",
                fix="compare them with your own copies; if you changed them yourself, run the command again",
            )
        return told


def why_full(folder: Path) -> str | None:
    """Return why a folder takes no more, in words; None if it does."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_ROOM_BYTES))
    except OSError as error:
        return f"{error.strerror}: {folder}"
    return None


def clear_leftovers(cache_folder: Path) -> dict[Path, tuple[str, ...]]:
    """Restore the user's files for every capture whose zerofit is gone, and end its remaining processes.

    Returns:
        Sentences on what is left, by the capture's folder; a folder that still exists has copies of files
        that were changed since, and is checked again unless keep() is called with it.

    Raises:
        UserError: a file could not be restored.
    """
    told = {}
    for folder in (cache_folder / _FOLDERS).glob("*"):
        owner = _lock_if_orphaned(folder)
        if owner is not None:
            with owner:
                kill_marked(str(folder))
                damaged = is_damaged(folder)
                undone = _undo(folder, last_written_ns(folder))
                told[folder] = (*_leftover_words(folder, undone), *(_damage_words(folder) if damaged else ()))
                if not (undone.newer or damaged):
                    _remove(folder)
    return told


def keep(folder: Path) -> None:
    """Move a folder whose copies were reported to the user, so that later runs don't report it again."""
    kept = _kept(folder)
    if folder.exists() and kept != folder:
        kept.parent.mkdir(exist_ok=True)
        folder.rename(kept)


def _lock_if_orphaned(folder: Path) -> IO[str] | None:
    """Return the locked file of a capture whose owner is gone; None if it may run, here or elsewhere.

    Both the lock and the machine are checked: some shared file systems keep locks per machine, and several
    machines may have the same name.
    """
    if not (folder / _OWNER).is_file():
        return None
    try:
        file = (folder / _OWNER).open("r+", encoding="utf-8")
    except OSError:  # it is being created, or cleared
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        owner, here = json.load(file), _machine()
        if owner["boot"] == here["boot"] or owner["host"] == here["host"]:
            return file
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    file.close()
    return None


def _machine() -> dict[str, str]:
    """Return the identity of this machine and its boot, which containers on it share."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return {"host": socket.gethostname(), "boot": boot}


def _undo(folder: Path, ended_ns: int) -> UndoResult:
    undone = undo(folder, ended_ns=ended_ns)
    if undone.lost:
        raise UserError(
            "capture-files-changed",
            "files that the script overwrote could not be restored",
            found="\n         ".join(undone.lost),
            why="zerofit ran the beginning of the script, and made copies of the files that it overwrote",
            fix="make them writable, or free disk space, and copy them back",
        )
    return undone


def _restored_words(undone: UndoResult) -> tuple[str, ...]:
    """Return one sentence on the files that the capture changed or made, and that are as they were."""
    said = [
        f"{verb} {_some_of(paths)}"
        for verb, paths in (("restored", undone.restored), ("removed", undone.removed))
        if paths
    ]
    return (f"after the capture, what the script wrote was undone: {'; '.join(said)}",) if said else ()


def _some_of(paths: tuple[str, ...]) -> str:
    """Return the first of some paths, without those in folders among them."""
    outer = [path for path in paths if os.path.dirname(path) not in paths]
    more = f" and {len(outer) - _NUM_NAMED} more" if len(outer) > _NUM_NAMED else ""
    return ", ".join(outer[:_NUM_NAMED]) + more


def _leftover_words(folder: Path, undone: UndoResult) -> tuple[str, ...]:
    made = [
        f"{path} was created by the capture, and is kept because it contains files" for path in undone.left
    ]
    newer = [
        f"{path} was written by the capture and again since, and is not restored; its copy is in "
        f"{_kept(folder)}"
        for path in undone.newer
    ]
    return (*made, *newer)


def _damage_words(folder: Path) -> tuple[str, ...]:
    return (
        "the record of an interrupted capture is damaged, so that a file which the script changed may not be "
        f"restored; the copies are in {_kept(folder)}",
    )


def _kept(folder: Path) -> Path:
    return folder.parent.parent / _KEPT / folder.name if folder.parent.name == _FOLDERS else folder


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError, ValueError):
        temporary = Path((folder / _TEMPORARY).read_text(encoding="utf-8"))
        if temporary.name.startswith(_PREFIX) and temporary.parent == Path(tempfile.gettempdir()):
            shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
