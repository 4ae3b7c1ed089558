"""The folder of unfinished results: whose it is, that one run writes it at a time, which files are in it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
from typing import TYPE_CHECKING, Any

from zerofit.generation.results.errors import in_use, not_ours, other_job, out_exists, unfinished

if TYPE_CHECKING:
    from pathlib import Path

_VERSION = 1
"""Of the files in the folder; rises when an older zerofit could not read them."""
_JOB = "job.json"
_WHOLE = "whole.jsonl"
_PART = re.compile(r"start(\d+)-rank(\d+)\.jsonl")
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})
"""What link(2) answers on file systems that have no hard links."""


def parts_folder(out: Path) -> Path:
    """Return where the unfinished results of a run stand."""
    return out.parent / f"{out.name}.parts"


def part_file(folder: Path, *, start: int, rank: int) -> Path:
    """Return the file that a rank of the start'th run writes."""
    return folder / f"start{start}-rank{rank}.jsonl"


def part_files(folder: Path) -> dict[tuple[int, int], Path]:
    """Return the files of all ranks of all starts that are there, by (start, rank), in this order."""
    found = {}
    for path in folder.iterdir():
        if matched := _PART.fullmatch(path.name):
            found[int(matched[1]), int(matched[2])] = path
    return dict(sorted(found.items()))


def whole_file(folder: Path) -> Path:
    """Return where all results are put in order, before they get the name that the user asked for."""
    return folder / _WHOLE


def kept_files(out: Path) -> list[Path]:
    """Return the files with the results that earlier runs left of a file that is not whole yet."""
    folder = parts_folder(out)
    return list(part_files(folder).values()) if folder.is_dir() else []


def kept_batch_size(out: Path) -> int | None:
    """Return in what batches the results that earlier runs left were made; None where that is not known."""
    if not _has_results(parts_folder(out)):
        return None
    size = _job(_read_job(parts_folder(out))).get("batch_size")
    return size if type(size) is int and size > 0 else None


def check_free(out: Path) -> None:
    """Check that nothing of the user's has the name that the results are to get.

    Raises:
        UserError: something has.
    """
    if os.path.lexists(out) and not _is_reserved(out):
        raise out_exists(out, whole_beside=parts_folder(out) if _is_whole(out) else None)


def check_claim(out: Path, *, fingerprint: str, resume: bool) -> None:
    """Check that a run could claim the folder of its parts; nothing is written, nor locked.

    Args:
        out: the file that gets all results at the end.
        fingerprint: of all that decides about the results.
        resume: whether unfinished results of the same fingerprint are continued.

    Raises:
        UserError: something is at `out`, or the folder is another's, not to be continued, or claimed.
        OSError: it can't be read.
    """
    _check(out, fingerprint=fingerprint, resume=resume)
    folder = parts_folder(out)
    with contextlib.suppress(FileNotFoundError), (folder / _JOB).open("rb") as file:
        _lock(file.fileno(), folder, how=fcntl.LOCK_SH)


def claim(out: Path, *, fingerprint: str, resume: bool, batch_size: int | None = None) -> int:
    """Make or take over the folder of a run's parts.

    Args:
        out: the file that gets all results at the end.
        fingerprint: of all that decides about the results.
        resume: whether unfinished results of the same fingerprint are continued.
        batch_size: prompts in one call, noted for a later run: when tokens are drawn, it decides about them.

    Returns:
        The open job file: as long as it is, no other run can claim the folder; the lock goes with the
        process, however that ends.

    Raises:
        UserError: as check_claim's.
        OSError: it can't be written.
    """
    folder = parts_folder(out)
    _check(out, fingerprint=fingerprint, resume=resume)
    folder.mkdir(exist_ok=True)
    lock = os.open(folder / _JOB, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(lock, folder, how=fcntl.LOCK_EX)
        _check(out, fingerprint=fingerprint, resume=resume)  # again, as no other run changes it now
        if not is_claimed(folder, fingerprint=fingerprint):
            _note_job(lock, folder, {"fingerprint": fingerprint, "batch_size": batch_size})
        if _is_reserved(out):
            out.unlink()
    except BaseException:
        os.close(lock)
        raise
    return lock


def is_claimed(folder: Path, *, fingerprint: str) -> bool:
    """Return whether the folder is there, and rank 0 has claimed it for a run of this fingerprint."""
    job = _job(_read_job(folder))
    return (job.get("version"), job.get("fingerprint")) == (_VERSION, fingerprint)


def name_whole(whole: Path, out: Path) -> None:
    """Give the results the name that the user asked for, all at once.

    Raises:
        FileExistsError: something has it; it stays as it is.
        OSError: the folder can't be written.
    """
    try:
        os.link(whole, out)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.close(os.open(out, os.O_CREAT | os.O_EXCL, 0o666))  # the name is ours, or this raises
        os.replace(whole, out)
    sync_folder(out.parent)


def remove_parts(folder: Path) -> None:
    """Remove what runs have written there; what else is there stays, and so does the folder then."""
    with contextlib.suppress(OSError):
        for path in (*part_files(folder).values(), whole_file(folder), folder / _JOB):
            path.unlink(missing_ok=True)
        folder.rmdir()


def sync_folder(folder: Path) -> None:
    """Write the names of a folder's files to the disk, where its file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check(out: Path, *, fingerprint: str, resume: bool) -> None:
    check_free(out)
    folder = parts_folder(out)
    if not os.path.lexists(folder):
        return
    if not _is_ours(folder):
        raise not_ours(folder)
    has_results = _has_results(folder)
    if has_results and not is_claimed(folder, fingerprint=fingerprint):
        raise other_job(folder, why=_difference(folder))
    if has_results and not resume:
        raise unfinished(folder)


def _has_results(folder: Path) -> bool:
    return folder.is_dir() and any(path.stat().st_size for path in part_files(folder).values())


def _is_whole(out: Path) -> bool:
    """Return whether a run that was killed at its end left all results at OUT, and the parts beside it."""
    try:
        return whole_file(parts_folder(out)).samefile(out)
    except OSError:
        return False


def _is_reserved(out: Path) -> bool:
    """Return whether a run that was killed in name_whole() left the name, and nothing in it."""
    try:
        has_whole = whole_file(parts_folder(out)).is_file()
    except OSError:
        return False
    is_empty = not out.is_symlink() and out.is_file() and not out.stat().st_size
    return has_whole and is_empty and not _is_whole(out)


def _lock(lock: int, folder: Path, *, how: int) -> None:
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
        is_there = os.path.samestat(os.fstat(lock), os.stat(folder / _JOB))
    except BlockingIOError:
        raise in_use(folder) from None
    except FileNotFoundError:
        is_there = False
    except OSError:
        return  # a file system without locks: each start writes files of its own, so that nothing is lost
    if not is_there:  # between opening and locking, the run that had the lock ended and removed the folder
        raise in_use(folder)


def _note_job(lock: int, folder: Path, job: dict[str, Any]) -> None:
    """Write whose results will be there, in a folder that has none."""
    for path in part_files(folder).values():  # a killed run's rank may live on for a moment, and write there
        path.unlink()
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{json.dumps({'version': _VERSION, **job})}\n".encode(), 0)
    os.fsync(lock)
    sync_folder(folder)


def _is_ours(folder: Path) -> bool:
    """Return whether a folder is one of parts, or one that a run was killed in before it could say so."""
    if not folder.is_dir():
        return False
    text = _read_job(folder)
    return bool(_job(text)) if text else os.listdir(folder) in ([], [_JOB])


def _difference(folder: Path) -> str:
    if _job(_read_job(folder)).get("version") != _VERSION:
        return "another version of zerofit wrote them"
    return "they were made with another model, other prompts or other settings"


def _job(text: str | None) -> dict[str, Any]:
    """Return what a job file says; nothing where it is no job file."""
    try:
        document = json.loads(text or "")
    except ValueError:
        return {}
    is_job = isinstance(document, dict) and set(document) >= {"version", "fingerprint"}
    return document if is_job else {}


def _read_job(folder: Path) -> str | None:
    try:
        return (folder / _JOB).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
