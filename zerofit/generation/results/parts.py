"""Results on disk as they come: one file per rank and start beside OUT, merged when all are done.

`OUT.parts/` holds `job.json`, which says whose results they are and is locked while a run writes them, and
`start2-rank0.jsonl` and so on, which only ever grow. A run that is killed leaves at most a half line at the
end of each; the next start reads all whole lines, and writes files of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from zerofit.core.errors import EXIT_USAGE, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

Document = Mapping[str, Any]
"""The results of one prompt as JSON; its place among all prompts is its "index"."""

_VERSION = 1
"""Of the files in the folder; rises when an older zerofit could not read them."""
_JOB, _WHOLE = "job.json", "whole.jsonl"
_PART = re.compile(r"start(\d+)-rank(\d+)\.jsonl")
_UNSEEN = "rank 0 made it, rank {} does not see it as rank 0 does"
_MOST_NAMED = 5
"""ASSUMPTION: so many prompts show which are missing; more would hide what to do."""


def parts_folder(out: Path) -> Path:
    """Return the folder of the unfinished results of a run."""
    return out.parent / f"{out.name}.parts"


def kept_lines(out: Path) -> dict[int, bytes]:
    """Return the lines of the results that earlier runs left unfinished, by the index of their prompt."""
    folder = parts_folder(out)
    return _lines_of(_part_files(folder).values()) if folder.is_dir() else {}


def kept_batch_size(out: Path) -> int | None:
    """Return the batch size of unfinished results; None where there are none or it is not known."""
    folder = parts_folder(out)
    return _read_job(folder).get("batch_size") if _has_results(folder) else None


def check_free(out: Path) -> None:
    """Check that there is nothing at the place of the results."""
    if not os.path.lexists(out):
        return
    is_dangling = out.is_symlink() and not out.exists()
    kind = "a folder" if out.is_dir() else "a link to nothing" if is_dangling else "a file"
    raise UserError(
        "generate-out-exists",
        "the file for the results is there already",
        found=f"{out}: {kind}",
        why="it may hold results of yours, and they are never written over",
        fix="write to another file, or move that one away",
    )


def check_claim(out: Path, *, fingerprint: str, resume: bool) -> None:
    """Check that claim() could succeed; nothing is written."""
    _check(out, fingerprint=fingerprint, resume=resume)
    folder = parts_folder(out)
    with contextlib.suppress(FileNotFoundError), (folder / _JOB).open("rb") as file:
        _lock(file.fileno(), folder, how=fcntl.LOCK_SH)


def claim(out: Path, *, fingerprint: str, resume: bool, batch_size: int | None = None) -> int:
    """Make or take over the folder of a run's parts.

    Args:
        batch_size: prompts in one call, noted for a later run: when tokens are drawn, it decides about them.

    Returns:
        The open job file: as long as it is, no other run can claim the folder; the lock goes with the
        process, however that ends.

    Raises:
        OSError: it can't be written.
    """
    folder = parts_folder(out)
    _check(out, fingerprint=fingerprint, resume=resume)
    folder.mkdir(exist_ok=True)
    lock = os.open(folder / _JOB, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(lock, folder, how=fcntl.LOCK_EX)
        _check(out, fingerprint=fingerprint, resume=resume)  # again, as no other run changes it now
        if not _is_claimed(folder, fingerprint):
            for path in _part_files(folder).values():  # empty, or a killed run's rank still writes it
                path.unlink()
            job = {"version": _VERSION, "fingerprint": fingerprint, "batch_size": batch_size}
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{json.dumps(job)}\n".encode(), 0)
            os.fsync(lock)
    except BaseException:
        os.close(lock)
        raise
    return lock


class PartFiles:
    """One rank's file among the unfinished results of a run; a context manager.

    Rank 0 opens first, the others after it has.

    Raises:
        UserError: as claim's; the folder can't be written, or isn't seen by this rank.
    """

    def __init__(
        self,
        out: Path,
        *,
        fingerprint: str,
        rank: int,
        world_size: int,
        resume: bool,
        batch_size: int | None = None,
    ) -> None:
        self.out, self.folder = out, parts_folder(out)
        self._rank, self._world_size = rank, world_size
        self._num_bytes = 0
        self._held: list[int] = []
        try:
            if rank == 0:
                self._held = [claim(out, fingerprint=fingerprint, resume=resume, batch_size=batch_size)]
            elif not _is_claimed(self.folder, fingerprint):
                raise self._not_shared(_UNSEEN.format(rank))
            self._start = max((start for start, _ in _part_files(self.folder)), default=0) + (rank == 0)
            self._path = self.folder / f"start{self._start}-rank{rank}.jsonl"
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
            self._held.append(self._file)
        except OSError as error:
            while self._held:
                os.close(self._held.pop())
            raise not_writable(self.folder, error) from None

    @cached_property
    def done(self) -> dict[int, dict[str, Any]]:
        """Documents of the prompts that earlier starts have done, by index, as of the first look.

        Take rank 0's for all ranks: a rank of an earlier start may live on for a moment, so that two looks
        differ.
        """
        earlier = [path for (start, _), path in _part_files(self.folder).items() if start < self._start]
        return {index: json.loads(line) for index, line in _lines_of(earlier).items()}

    def check_ranks(self) -> None:
        """Check on rank 0 that it sees the files of all ranks, once all have opened theirs."""
        files = _part_files(self.folder)
        for rank in range(self._world_size):
            if (self._start, rank) not in files:
                raise self._not_shared(_UNSEEN.format(rank))

    def write(self, documents: Iterable[Document]) -> None:
        """Write documents, one line each; they are on the disk when this returns.

        Raises:
            UserError: the disk is full, or can't be written; what was written before stays.
        """
        lines = rest = memoryview(b"".join(map(_line, documents)))
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
            os.fsync(self._file)  # 0.2 ms on an SSD with ext4: little beside a batch, which takes 50 and more
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._num_bytes)
            raise not_writable(self._path, error) from None
        self._num_bytes += len(lines)

    def assemble(
        self, num_prompts: int, *, describe: Callable[[dict[str, Any]], Document] | None = None
    ) -> None:
        """Put all results into OUT, in input order, whole or not at all; then remove the parts.

        On rank 0 only, when all ranks have written theirs.

        Args:
            describe: returns what OUT gets of a document; None for the documents as they are.

        Raises:
            UserError: a result is missing, something is at OUT by now, or it can't be written; the parts
                stay.
        """
        try:
            lines = _lines_of(_part_files(self.folder).values())
            missing = [index for index in range(num_prompts) if index not in lines]
            if missing:
                named = ", ".join(map(str, missing[:_MOST_NAMED])) + (", ..." * (len(missing) > _MOST_NAMED))
                found = f"{len(missing)} of {num_prompts} results are not there: of prompts {named}"
                raise self._not_shared(found, exit_code=1)
            with (self.folder / _WHOLE).open("wb") as whole:
                for index in range(num_prompts):
                    line = lines[index]
                    whole.write(line if describe is None else _line(describe(json.loads(line))))
                whole.flush()
                os.fsync(whole.fileno())
            check_free(self.out)
            os.rename(self.folder / _WHOLE, self.out)
        except OSError as error:
            raise not_writable(self.out, error) from None
        else:
            _remove_parts(self.folder)

    def close(self) -> None:
        """Close the files; what was written stays, and where nothing was, nothing is left."""
        if self._held and not self._num_bytes:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
                if self._rank == 0 and not _part_files(self.folder):
                    _remove_parts(self.folder)
        while self._held:
            os.close(self._held.pop())

    def _not_shared(self, found: str, exit_code: int = EXIT_USAGE) -> UserError:
        return UserError(
            "generate-out-not-shared",
            "not every rank sees the folder of the results",
            found=f"{self.folder}: {found}",
            why="each rank writes its results there, and rank 0 puts them together",
            fix="name a file on a file system that all nodes share; what is there is kept, and the same "
            "command does the rest",
            exit_code=exit_code,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def not_writable(path: Path, error: OSError) -> UserError:
    """Return the error of results that the system refuses to write."""
    return UserError(
        "generate-out-not-writable",
        "the results can't be written",
        found=f"{error.strerror}: {path}",
        why="each result is written as it comes, beside the file that all go into at the end",
        fix="name a file in a folder that is there, can be written and has room; what was written is kept, "
        "and the same command goes on from it",
    )


def _check(out: Path, *, fingerprint: str, resume: bool) -> None:
    check_free(out)
    folder = parts_folder(out)
    if not os.path.lexists(folder):
        return
    if not _is_ours(folder):
        raise UserError(
            "generate-parts-not-zerofits",
            "the folder for unfinished results is another's",
            found=f"{folder}: it holds no job.json of `zerofit generate`",
            why="results are kept there until all are done, and the folder is removed then",
            fix="write the results to another file, or move that folder away",
        )
    if not _has_results(folder):
        return
    if not _is_claimed(folder, fingerprint):
        is_readable = _read_job(folder)["version"] == _VERSION
        made = "they were made with another model, other prompts or other settings"
        raise UserError(
            "generate-other-parts",
            "the unfinished results there are those of another run",
            found=f"{folder}: {made if is_readable else 'another version of zerofit wrote them'}",
            why="a file would get results of two kinds",
            fix="write the results to another file, or, if you don't need the unfinished ones: "
            f"rm -r {folder}",
        )
    if not resume:
        raise UserError(
            "generate-parts-exist",
            "there are unfinished results of an earlier run",
            found=str(folder),
            why="they would be continued with resume=True only",
            fix=f"pass resume=True, write to another file, or, if you don't need them: rm -r {folder}",
        )


def _lock(lock: int, folder: Path, *, how: int) -> None:
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
        # Between opening and locking, the run that had the lock may have ended and removed the folder.
        is_there = os.path.samestat(os.fstat(lock), os.stat(folder / _JOB))
    except (BlockingIOError, FileNotFoundError):
        is_there = False
    except OSError:
        return  # a file system without locks: each start writes files of its own, so that nothing is lost
    if not is_there:
        raise UserError(
            "generate-out-in-use",
            "another run is writing these results",
            found=f"{folder / _JOB} is locked by a living process",
            why="two runs would do each prompt twice",
            fix="wait for it, end it, or write the results to another file",
        )


def _read_job(folder: Path) -> dict[str, Any]:
    """Return the content of the job file; an empty dict if there is none of ours."""
    try:
        document = json.loads((folder / _JOB).read_text(encoding="utf-8", errors="replace"))
    except (FileNotFoundError, ValueError):
        return {}
    is_job = isinstance(document, dict) and set(document) >= {"version", "fingerprint"}
    return document if is_job else {}


def _is_claimed(folder: Path, fingerprint: str) -> bool:
    job = _read_job(folder)
    return (job.get("version"), job.get("fingerprint")) == (_VERSION, fingerprint)


def _is_ours(folder: Path) -> bool:
    """True if a folder is one of parts, or one that a run was killed in before it could say so."""
    if not folder.is_dir() or _read_job(folder):
        return folder.is_dir()
    job = folder / _JOB
    return os.listdir(folder) in ([], [_JOB]) and not (job.exists() and job.stat().st_size)


def _has_results(folder: Path) -> bool:
    return folder.is_dir() and any(path.stat().st_size for path in _part_files(folder).values())


def _part_files(folder: Path) -> dict[tuple[int, int], Path]:
    """Return the files of all ranks of all starts that are there, by (start, rank), in this order."""
    matched = ((_PART.fullmatch(path.name), path) for path in folder.iterdir())
    return dict(sorted(((int(name[1]), int(name[2])), path) for name, path in matched if name))


def _remove_parts(folder: Path) -> None:
    """Remove what runs have written there; what else is there stays, and so does the folder then."""
    with contextlib.suppress(OSError):
        for path in (*_part_files(folder).values(), folder / _WHOLE, folder / _JOB):
            path.unlink(missing_ok=True)
        folder.rmdir()


def _line(document: Document) -> bytes:
    """Return a document's line: readable, or escaped where its text is no valid Unicode."""
    try:
        return f"{json.dumps(document, ensure_ascii=False)}\n".encode()
    except UnicodeEncodeError:
        return f"{json.dumps(document)}\n".encode()


def _lines_of(paths: Iterable[Path]) -> dict[int, bytes]:
    """Return the lines of some files by the index of their prompt; where two have one, the first counts.

    A line without an end is what a killed run leaves, and is no line; so is one that holds no document, which
    a machine leaves that lost its power.
    """
    found: dict[int, bytes] = {}
    for path in paths:
        with path.open("rb") as file:
            for line in file:
                index = _index(line)
                if index is not None:
                    found.setdefault(index, line)
    return found


def _index(line: bytes) -> int | None:
    try:
        document = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    index = document.get("index") if isinstance(document, dict) else None
    return index if type(index) is int and index >= 0 else None
