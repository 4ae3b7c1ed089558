"""The folder of one capture, and what is done about one whose zerofit was killed before it could clear up."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import psutil

from zerofit.errors import UserError
from zerofit.probe.capture_files import undo
from zerofit.probe.script_process import end_marked

_FOLDERS = "capturing"
_OWNER = "owner.json"


def new_folder(cache_folder: Path | None) -> Path:
    """Return a new folder for a capture, which nobody else can read.

    It lies in zerofit's cache folder, where copies of the user's files outlive a restart and take no memory
    as they may in /tmp; in /tmp where there is none, or none that can be written to.
    """
    folder = None
    if cache_folder is not None:
        with contextlib.suppress(OSError):
            (cache_folder / _FOLDERS).mkdir(parents=True, exist_ok=True)
            folder = tempfile.mkdtemp(prefix="", dir=cache_folder / _FOLDERS)
    place = Path(os.path.realpath(folder or tempfile.mkdtemp(prefix="zerofit-")))
    owner = {"pid": os.getpid(), "started": psutil.Process().create_time()}
    (place / _OWNER).write_text(json.dumps(owner), encoding="utf-8")
    return place


def clear(folder: Path) -> tuple[str, ...]:
    """Put the user's files back, and remove a capture's folder.

    Returns:
        Folders that the capture made and that stay (see capture_files.Undone).

    Raises:
        UserError: a file could not be put back; the folder with its copy stays.
    """
    undone = undo(folder)
    if undone.lost:
        raise UserError(
            "capture-files-changed",
            "files that the script overwrote could not be put back",
            found="\n         ".join(undone.lost),
            why="zerofit ran the script up to its training, and kept copies of what it overwrote",
            fix="make them writable, or room on the disk, and copy them back",
        )
    shutil.rmtree(folder, ignore_errors=True)
    return undone.left


def clear_leftovers(cache_folder: Path) -> None:
    """Put the user's files back for every capture whose zerofit is gone, and end what is left of it.

    Raises:
        UserError: a file could not be put back.
    """
    for folder in (cache_folder / _FOLDERS).glob("*"):
        if _is_left(folder):
            end_marked(str(folder))
            clear(folder)


def _is_left(folder: Path) -> bool:
    try:
        owner = json.loads((folder / _OWNER).read_text(encoding="utf-8"))
        return bool(psutil.Process(owner["pid"]).create_time() != owner["started"])
    except psutil.NoSuchProcess:
        return True
    except (OSError, ValueError, KeyError, psutil.Error):
        return False
