"""Restores a user's files to their state before a capture, from the capture's journal."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.scripts.capture.journal import COPIES, Change, JournalEntry, read_entries
from zerofit.scripts.target import script_arguments, script_path

if TYPE_CHECKING:
    from collections.abc import Mapping

_CACHE_VARIABLES = (
    *("HF_ASSETS_CACHE", "HF_DATASETS_CACHE", "HF_HOME", "HF_HUB_CACHE", "HF_MODULES_CACHE", "HF_XET_CACHE"),
    *("KERAS_HOME", "MPLCONFIGDIR", "NLTK_DATA", "NUMBA_CACHE_DIR", "PYTHONPYCACHEPREFIX", "TORCH_HOME"),
    *("TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TRANSFORMERS_CACHE", "TRITON_CACHE_DIR"),
    "XDG_CACHE_HOME",
)
"""Variables that name folders of files that are downloaded or computed again if missing.

Source: https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables and the manuals of
the others.
"""
_CACHES_AT_HOME = (".cache", ".triton", ".nv", ".config/matplotlib", "nltk_data")
_CACHES_IN_TMP = ("data-gym-cache", "ray", "tfhub_modules")
"""Cache folders in /tmp of tiktoken (tiktoken/load.py), ray and tensorflow_hub (resolver.py)."""
_TMP = Path("/tmp")
_CLOCKS_NS = 2_000_000_000
"""ASSUMPTION: maximum clock difference of a file server."""
_MAX_CHARACTERS = 4096
"""Maximum path length (PATH_MAX, linux/limits.h)."""


def places(
    target: tuple[str, ...], *, environment: Mapping[str, str], cwd: Path, home: Path
) -> dict[str, list[str]]:
    """Return the user's folders ("roots"), and cache folders, which stay as a script leaves them.

    The user's are the script's working folder and paths in its arguments, and named files in /tmp, since
    temporary files have a separate folder. A folder given by a flag such as --cache_dir is a cache.
    """
    named = [environment[name] for name in _CACHE_VARIABLES if os.path.isabs(environment.get(name, ""))]
    flagged = [str(cwd / value) for flag, value in _arguments(target) if "cache" in flag]
    at_home = [str(home / name) for name in _CACHES_AT_HOME]
    script = script_path(target)
    here = [cwd] if script is None else [cwd, (cwd / script).parent]
    caches = [*named, *flagged, *at_home, *(str(_TMP / name) for name in _CACHES_IN_TMP)]
    return {
        "roots": [str(path) for path in (*here, *argument_paths(target, cwd))],
        "caches": [path for path in caches if Path(path) not in here],
    }


def argument_paths(target: tuple[str, ...], cwd: Path) -> list[Path]:
    """Return the paths, existing or not, that a script's arguments may denote.

    A folder that contains the script's working folder, such as "..", is left out.
    """
    here = Path(os.path.realpath(cwd))
    paths = [cwd / word for word in dict.fromkeys(value for _, value in _arguments(target)) if word]
    return [path for path in paths if not here.is_relative_to(os.path.realpath(path))]


def _arguments(target: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return each argument of a script that is not a flag, with the flag before it, or "".

    Values that can't be a path, as too long or containing a NUL, are left out.
    """
    found = []
    last = ""
    for word in script_arguments(target):
        flag, _, value = word.partition("=") if word.startswith("-") else (last, "", word)
        if value and len(value) < _MAX_CHARACTERS and "\0" not in value:
            found.append((flag, value))
        last = flag if word.startswith("-") else ""
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class UndoResult:
    """What could not be restored; empty if everything was."""

    left: tuple[str, ...] = ()
    """Folders made by the capture that are kept, since they contain unrecorded files."""
    lost: tuple[str, ...] = ()
    """Files that could not be restored, each with its copy."""
    newer: tuple[str, ...] = ()
    """Files that changed after the capture's end, and are kept: each with its copy."""


def undo(folder: Path, *, ended_ns: int) -> UndoResult:
    """Undo the changes in a capture's journal, and return what is left; may be called repeatedly.

    Files get their content, times and permissions back; what the capture made is removed, a folder only if
    empty. Changes after the capture are the user's, and are kept.

    Args:
        folder: the capture's.
        ended_ns: when its last process ended, as time.time_ns().
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
    return UndoResult(
        left=tuple(path for path in folders if os.path.isdir(path)),
        lost=tuple(sorted(lost)),
        newer=tuple(_with_copy(folder, path, by_path[path]) for path in sorted(newer)),
    )


def _changed_ns(path: str) -> int:
    """Return when a file last changed, even by a copy that keeps its times; 0 for a folder or nothing."""
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
    shutil.copyfile(folder / COPIES / before.copy, path)  # in place: links to the file are kept
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
