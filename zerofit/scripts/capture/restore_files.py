"""Restores a user's files to their state before a capture, from the capture's journal."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.scripts.capture.journal import (
    COPIES,
    UNCONFINED,
    Change,
    JournalEntry,
    Stamp,
    read_entries,
    read_paths,
    stamp_of,
)
from zerofit.scripts.target import script_arguments, script_path

if TYPE_CHECKING:
    from collections.abc import Mapping

_CACHE_VARIABLES = (
    "HF_ASSETS_CACHE",
    "HF_DATASETS_CACHE",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_MODULES_CACHE",
    "HF_XET_CACHE",
    "KERAS_HOME",
    "MPLCONFIGDIR",
    "NLTK_DATA",
    "NUMBA_CACHE_DIR",
    "PYTHONPYCACHEPREFIX",
    "TORCH_HOME",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR",
    "TRANSFORMERS_CACHE",
    "TRITON_CACHE_DIR",
)
"""Variables that name folders of files that are downloaded or computed again if missing.

Source: https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables and the manuals of
the others.
"""
_CACHES_AT_HOME = (".triton", ".nv", ".config/matplotlib", "nltk_data")
_CACHES = (
    "clip",
    "deepspeed",
    "flashinfer",
    "fontconfig",
    "gdown",
    "gensim-data",
    "huggingface",
    "kagglehub",
    "keras",
    "matplotlib",
    "modelscope",
    "nvidia",
    "open_clip",
    "pip",
    "tiktoken",
    "torch",
    "torch_extensions",
    "triton",
    "uv",
    "vllm",
    "whisper",
)
"""Folders below ~/.cache of such files; others are programs' own, or users'."""
_MADE_CACHES = ("huggingface",)
"""Those that compiled code (hf_xet) and forked processes (datasets) write."""
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
    temporary files have a separate folder. A folder given by a flag such as --cache_dir is a cache. Under
    "made_caches" are those caches that must exist.
    """
    named = [environment[name] for name in _CACHE_VARIABLES if os.path.isabs(environment.get(name, ""))]
    flagged = [str(cwd / value) for flag, value in _arguments(target) if "cache" in flag]
    at_home = [str(home / name) for name in _CACHES_AT_HOME]
    base = Path(environment.get("XDG_CACHE_HOME", ""))
    below = base if base.is_absolute() else home / ".cache"
    script = script_path(target)
    here = [cwd] if script is None else [cwd, (cwd / script).parent]
    in_tmp = [str(_TMP / name) for name in _CACHES_IN_TMP]
    caches = [*named, *flagged, *(str(below / name) for name in _CACHES), *at_home, *in_tmp]
    return {
        "roots": [str(path) for path in (*here, *argument_paths(target, cwd))],
        "caches": [path for path in caches if Path(path) not in here],
        "made_caches": [*named, *(str(below / name) for name in _MADE_CACHES)],
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
    """What was restored, and what could not be."""

    restored: tuple[str, ...] = ()
    """Files and folders that are again as they were."""
    removed: tuple[str, ...] = ()
    """Files and folders that the capture had made."""
    left: tuple[str, ...] = ()
    """Folders made by the capture that are kept, since they contain unrecorded files."""
    lost: tuple[str, ...] = ()
    """Files that could not be restored, each with its copy or how it differs."""
    newer: tuple[str, ...] = ()
    """Files that changed after the capture's end, and are kept: each with its copy."""


def undo(folder: Path, *, ended_ns: int) -> UndoResult:
    """Undo the changes in a capture's journal, and compare; may be called repeatedly.

    Files get their content, times, permissions and owner back; what the capture made is removed, a folder
    only if empty. Changes after the capture are the user's, and are kept.

    Args:
        folder: the capture's.
        ended_ns: when its last process ended, as time.time_ns().
    """
    until_ns = ended_ns + _CLOCKS_NS
    by_path: dict[str, list[JournalEntry]] = {}
    for entry in read_entries(folder)[0]:
        by_path.setdefault(entry.path, []).append(entry)
    first = {path: changes[0].change for path, changes in by_path.items()}
    folders = [path for path, change in first.items() if change is Change.MADE_FOLDER]
    caches = [path for path, change in first.items() if change is Change.MADE_CACHE]
    newer = {path for path in by_path.keys() - {*folders, *caches} if _changed_ns(path) > until_ns}
    newer = {path for path in newer if not _is_as_before(path, by_path[path][0].stamp)}
    made = [path for path, change in first.items() if change is Change.MADE and path not in newer]
    removed = [path for path in sorted((*made, *folders, *caches), key=len, reverse=True) if _remove(path)]
    restored, lost = [], [f"{path}, made by the script" for path in made if os.path.lexists(path)]
    changed = by_path.keys() - {*made, *folders, *caches, *newer}
    for path in sorted(changed, key=len, reverse=True):  # a folder's time changes with what is in it
        try:
            if _put_back(folder, path, by_path[path]):
                restored.append(path)
        except OSError as error:
            copy = _copy(folder, by_path[path])
            named = path if copy is None else f"{path}, its copy is {copy}"
            lost.append(f"{named}: {error.strerror}")
    return UndoResult(
        restored=tuple(sorted(restored)),
        removed=tuple(sorted({*removed} - {*caches})),
        left=tuple(path for path in folders if os.path.isdir(path)),
        lost=tuple(sorted(lost)),
        newer=tuple(_with_copy(folder, path, by_path[path]) for path in sorted(newer)),
    )


def unseen_changes(folder: Path, *, ended_ns: int) -> tuple[str, ...]:
    """Return the files that a script only read as far as was seen, and that differ nevertheless.

    Call it after undo(). There are none where the kernel kept the capture from writing unseen.
    """
    if not (folder / UNCONFINED).exists():
        return ()
    known = {entry.path for entry in read_entries(folder)[0]}
    return tuple(
        path
        for path, before in read_paths(folder).items()
        if path not in known and _now(path) != before and _changed_ns(path) <= ended_ns + _CLOCKS_NS
    )


def _remove(path: str) -> bool:
    """Remove a file or an empty folder; return False if there is none, or it can't be removed."""
    try:
        (os.rmdir if os.path.isdir(path) and not os.path.islink(path) else os.unlink)(path)
    except OSError:
        return False
    return True


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


def _put_back(folder: Path, path: str, changes: list[JournalEntry]) -> bool:
    """Restore a file or folder; return False if it had not changed.

    Raises:
        OSError: it can't be restored, or differs afterwards.
    """
    before = changes[0].stamp
    if changes[0].change is Change.REMOVED_FOLDER:
        os.makedirs(path, exist_ok=True)
        before = replace(before, inode=os.stat(path).st_ino, mtime_ns=os.stat(path).st_mtime_ns)
    now = _now(path)
    if now == before:
        return False
    _restore_inode(folder, path, changes)
    content = next((entry for entry in changes if entry.change is Change.KEPT), None)
    if content is not None and _now(path) != content.stamp:
        with contextlib.suppress(FileNotFoundError):
            os.chmod(path, 0o600)
        shutil.copyfile(folder / COPIES / content.copy, path)  # in place: links to the file are kept
        inode = os.stat(path).st_ino  # another one if the file was removed or replaced
        before = replace(before, inode=inode)
    status = os.stat(path)
    if (status.st_uid, status.st_gid) != (before.user, before.group):
        os.chown(path, before.user, before.group)
    if stat.S_IMODE(status.st_mode) != before.mode:
        os.chmod(path, before.mode)
    if status.st_mtime_ns != before.mtime_ns:
        os.utime(path, ns=(status.st_atime_ns, before.mtime_ns))
    if not _is_as_before(path, before):
        raise OSError(0, "it differs from before")
    return True


def _restore_inode(folder: Path, path: str, changes: list[JournalEntry]) -> None:
    """Put a file back that another one replaced."""
    for entry in changes:
        link = folder / COPIES / entry.copy
        if entry.change is Change.REPLACED and link.exists():
            if os.path.lexists(path) and os.path.samefile(link, path):
                link.unlink()  # os.replace() would leave two names of one file
            else:
                os.replace(link, path)


def _copy(folder: Path, changes: list[JournalEntry]) -> Path | None:
    kept = (Change.KEPT, Change.REPLACED)
    return next((folder / COPIES / entry.copy for entry in changes if entry.change in kept), None)


def _now(path: str) -> Stamp | None:
    try:
        return stamp_of(os.stat(path))
    except OSError:
        return None


def _is_as_before(path: str, before: Stamp) -> bool:
    """Return True if a file is as before; nothing brings back when its status last changed."""
    now = _now(path)
    return now is not None and replace(now, ctime_ns=0) == replace(before, ctime_ns=0)
