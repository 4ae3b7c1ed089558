"""Puts a user's files back as they were before a script was captured, from the capture's journal."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.scripts.capture.journal import COPIES, Change, JournalEntry, read_entries

if TYPE_CHECKING:
    from collections.abc import Mapping

_CACHE_VARIABLES = (
    *("HF_ASSETS_CACHE", "HF_DATASETS_CACHE", "HF_HOME", "HF_HUB_CACHE", "HF_MODULES_CACHE", "HF_XET_CACHE"),
    *("KERAS_HOME", "MPLCONFIGDIR", "NLTK_DATA", "NUMBA_CACHE_DIR", "PYTHONPYCACHEPREFIX", "TORCH_HOME"),
    *("TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TRANSFORMERS_CACHE", "TRITON_CACHE_DIR"),
    "XDG_CACHE_HOME",
)
"""Variables that name folders of what is fetched or computed again when it is missing.

Source: https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables and the manuals of
the others.
"""
_CACHES_AT_HOME = (".cache", ".triton", ".nv", ".config/matplotlib", "nltk_data")
_CACHES_IN_TMP = ("data-gym-cache", "ray", "tfhub_modules")
"""Folders in /tmp that tiktoken (tiktoken/load.py), ray and tensorflow_hub (resolver.py) keep."""
_TMP = Path("/tmp")
_CLOCKS_NS = 2_000_000_000
"""ASSUMPTION: the clock of a file server is less ahead than this."""
_MOST_CHARACTERS = 4096
"""Of a path (PATH_MAX, linux/limits.h)."""


def places(
    target: tuple[str, ...], *, environment: Mapping[str, str], cwd: Path, home: Path
) -> dict[str, list[str]]:
    """Return which folders are the user's ("roots") and which are caches, that stay as a script leaves them.

    What the script runs in and what its arguments name is the user's, and so is what it writes in /tmp by
    name, for its temporary files have a folder of their own. A folder named by a flag such as --cache_dir is
    a cache.
    """
    named = [environment[name] for name in _CACHE_VARIABLES if os.path.isabs(environment.get(name, ""))]
    flagged = [str(cwd / value) for flag, value in _arguments(target) if "cache" in flag]
    at_home = [str(home / name) for name in _CACHES_AT_HOME]
    here = [cwd] if target[0] == "-m" else [cwd, (cwd / target[0]).parent]
    caches = [*named, *flagged, *at_home, *(str(_TMP / name) for name in _CACHES_IN_TMP)]
    return {
        "roots": [str(path) for path in (*here, *argument_paths(target, cwd))],
        "caches": [path for path in caches if Path(path) not in here],
    }


def argument_paths(target: tuple[str, ...], cwd: Path) -> list[Path]:
    """Return what the arguments of a script may name on disk, be it there or not: each as a path.

    A folder that holds the one where the script runs, such as "..", is left out.
    """
    here = Path(os.path.realpath(cwd))
    paths = [cwd / word for word in dict.fromkeys(value for _, value in _arguments(target)) if word]
    return [path for path in paths if not here.is_relative_to(os.path.realpath(path))]


def _arguments(target: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return each argument of a script that is no flag, with the flag that it follows, or "".

    What can't be a path, as it is too long or holds a NUL, is left out.
    """
    found = []
    last = ""
    for word in target[2 if target[0] == "-m" else 1 :]:
        flag, _, value = word.partition("=") if word.startswith("-") else (last, "", word)
        if value and len(value) < _MOST_CHARACTERS and "\0" not in value:
            found.append((flag, value))
        last = flag if word.startswith("-") else ""
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Undone:
    """Changes that could not be undone; empty where all is as it was."""

    left: tuple[str, ...] = ()
    """Folders that the capture made and that stay, as something lies in them that nobody noted."""
    lost: tuple[str, ...] = ()
    """Files that could not be put back, each with the place of its copy."""
    newer: tuple[str, ...] = ()
    """Files that changed after the capture's end, and are left: each with the place of its copy."""


def undo(folder: Path, *, ended_ns: int) -> Undone:
    """Undo what the journal of a capture tells, and return what is left of it; safe to do again.

    A file gets its content, times and rights back; what the capture made goes, a folder only where nothing
    else lies in it. What changed later than the capture is the user's, and stays.

    Args:
        folder: the capture's.
        ended_ns: when its last process ended, as time.time_ns() has it.
    """
    until_ns = ended_ns + _CLOCKS_NS
    entries, _ = read_entries(folder)
    by_path: dict[str, list[JournalEntry]] = {}
    for entry in entries:
        by_path.setdefault(entry.path, []).append(entry)
    made = [path for path, changes in by_path.items() if changes[0].change is Change.MADE]
    folders = [path for path, changes in by_path.items() if changes[0].change is Change.MADE_FOLDER]
    newer = [path for path in by_path.keys() - {*folders} if _changed_ns(path) > until_ns]
    newer = [path for path in newer if not _is_as_before(path, by_path[path][0])]
    for path in set(made) - {*newer}:
        with contextlib.suppress(OSError):
            os.unlink(path)
    for path in sorted(folders, key=len, reverse=True):
        with contextlib.suppress(OSError):
            os.rmdir(path)
    lost = []
    for path in by_path.keys() - {*made, *folders, *newer}:
        try:
            _put_back(folder, path, by_path[path])
        except OSError as error:
            lost.append(f"{path}, its copy is {_copy(folder, by_path[path])}: {error.strerror}")
    return Undone(
        left=tuple(path for path in folders if os.path.isdir(path)),
        lost=tuple(sorted(lost)),
        newer=tuple(_with_copy(folder, path, by_path[path]) for path in sorted(newer)),
    )


def _changed_ns(path: str) -> int:
    """Return when a file last changed, be it by a copy that keeps its times; 0 for a folder or nothing."""
    try:
        status = os.lstat(path)
    except OSError:
        return 0
    return 0 if stat.S_ISDIR(status.st_mode) else status.st_ctime_ns


def _with_copy(folder: Path, path: str, changes: list[JournalEntry]) -> str:
    copy = _copy(folder, changes)
    return path if copy is None else f"{path} (before: {copy.relative_to(folder)})"


def _put_back(folder: Path, path: str, changes: list[JournalEntry]) -> None:
    before = changes[0]
    if before.change is Change.REMOVED_FOLDER:
        os.makedirs(path, exist_ok=True)
        os.chmod(path, before.mode)
        return
    if _is_as_before(path, before):
        return
    with contextlib.suppress(FileNotFoundError):
        os.chmod(path, 0o600)
    shutil.copyfile(folder / COPIES / before.copy, path)  # in place: links to the file stay
    os.chmod(path, before.mode)
    os.utime(path, ns=(os.stat(path).st_atime_ns, before.mtime_ns))


def _copy(folder: Path, changes: list[JournalEntry]) -> Path | None:
    return next((folder / COPIES / entry.copy for entry in changes if entry.change is Change.KEPT), None)


def _is_as_before(path: str, before: JournalEntry) -> bool:
    try:
        now = os.stat(path)
    except OSError:
        return False
    return (now.st_size, now.st_mtime_ns, now.st_mode & 0o7777) == (before.size, before.mtime_ns, before.mode)
