"""Results on disk as they are made: one file per rank and start beside OUT, merged at the end.

`OUT.parts/` has `job.json`, which identifies the run and is locked while it writes, and
`start2-rank0.jsonl` and so on, which are append-only. A killed run leaves at most one incomplete line at
the end of each; the next start reads all complete lines, and writes files of its own.
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
from zerofit.core.own_file import OwnDescriptor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

Document = Mapping[str, Any]
"""The results of one prompt as JSON; "index" is the prompt's index."""

_VERSION = 1
"""Of the files in the folder; raised when an older zerofit could not read them."""
_JOB, _WHOLE = "job.json", "whole.jsonl"
_PART = re.compile(r"start(\d+)-rank(\d+)\.jsonl")
_UNSEEN = "rank 0 made it, rank {} does not see it as rank 0 does"
_MOST_NAMED = 5
"""ASSUMPTION: enough prompts to see which are missing; more would hide the fix."""


def parts_folder(out: Path) -> Path:
    """Return the folder of a run's unfinished results."""
    return out.parent / f"{out.name}.parts"


def kept_lines(out: Path) -> dict[int, bytes]:
    """Return the lines of unfinished results of earlier runs, by prompt index."""
    folder = parts_folder(out)
    return _lines_of(_part_files(folder).values()) if folder.is_dir() else {}


def kept_batch_size(out: Path) -> int | None:
    """Return the batch size of unfinished results; None if there are none or it is unknown."""
    folder = parts_folder(out)
    return _read_job(folder).get("batch_size") if _has_results(folder) else None


def check_free(out: Path) -> None:
    """Check that nothing exists at the path of the results."""
    if not os.path.lexists(out):
        return
    is_dangling = out.is_symlink() and not out.exists()
    kind = "a folder" if out.is_dir() else "a link to nothing" if is_dangling else "a file"
    raise UserError(
        "generate-out-exists",
        "the file for the results already exists",
        found=f"{out}: {kind}",
        why="it may contain your results, and is never overwritten",
        fix="write to another file, or move that one away",
    )


def check_claim(out: Path, *, fingerprint: str, resume: bool) -> None:
    """Check that claim() would succeed, without writing."""
    _check(out, fingerprint=fingerprint, resume=resume)
    folder = parts_folder(out)
    with contextlib.suppress(FileNotFoundError), (folder / _JOB).open("rb") as file:
        _lock(file.fileno(), folder, how=fcntl.LOCK_SH)


def claim(out: Path, *, fingerprint: str, resume: bool, batch_size: int | None = None) -> int:
    """Create or take over the folder of a run's parts.

    Args:
        batch_size: prompts per call, recorded for a later run, since sampled tokens depend on it.

    Returns:
        The open job file: while it is open, no other run can claim the folder; the lock ends with the
        process in any case.

    Raises:
        OSError: it can't be written.
    """
    folder = parts_folder(out)
    _check(out, fingerprint=fingerprint, resume=resume)
    folder.mkdir(exist_ok=True)
    lock = os.open(folder / _JOB, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(lock, folder, how=fcntl.LOCK_EX)
        _check(out, fingerprint=fingerprint, resume=resume)  # again, since no other run can change it now
        if not _is_claimed(folder, fingerprint):
            for path in _part_files(folder).values():  # empty, or a killed run's rank is still writing it
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

    Rank 0 must open first.

    Raises:
        UserError: as claim(); the folder can't be written, or is not visible to this rank.
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
        self._held: list[OwnDescriptor] = []
        try:
            if rank == 0:
                lock = claim(out, fingerprint=fingerprint, resume=resume, batch_size=batch_size)
                self._held = [OwnDescriptor(lock)]
            elif not _is_claimed(self.folder, fingerprint):
                raise self._not_shared(_UNSEEN.format(rank))
            self._start = max((start for start, _ in _part_files(self.folder)), default=0) + (rank == 0)
            self._path = self.folder / f"start{self._start}-rank{rank}.jsonl"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
            self._file = OwnDescriptor(os.open(self._path, flags, 0o666))
            self._held.append(self._file)
        except OSError as error:
            self._let_go()
            raise not_writable(self.folder, error) from None

    @cached_property
    def done(self) -> dict[int, dict[str, Any]]:
        """Documents of the prompts done by earlier starts, by index, as of the first call.

        Use rank 0's for all ranks: a rank of an earlier start may live on for a moment, so that two ranks
        see different ones.
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
        """Write documents, one line each; they are on disk when this returns.

        Raises:
            UserError: the disk is full or not writable; earlier documents are kept.
        """
        lines = rest = memoryview(b"".join(map(_line, documents)))
        try:
            while rest:
                self._file.check()
                rest = rest[os.write(self._file.number, rest) :]
            # 0.2 ms on an SSD with ext4: little compared with a batch, which takes 50 ms and more
            os.fsync(self._file.number)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.check()
                os.ftruncate(self._file.number, self._num_bytes)
            raise not_writable(self._path, error) from None
        self._num_bytes += len(lines)

    def assemble(
        self, num_prompts: int, *, describe: Callable[[dict[str, Any]], Document] | None = None
    ) -> None:
        """Write all results to OUT atomically, in input order; then remove the parts.

        On rank 0 only, when all ranks have written theirs.

        Args:
            describe: returns what OUT gets of a document; None for the documents themselves.

        Raises:
            UserError: a result is missing, OUT exists by now, or it can't be written; the parts are kept.
        """
        try:
            lines = _lines_of(_part_files(self.folder).values())
            missing = [index for index in range(num_prompts) if index not in lines]
            if missing:
                named = ", ".join(map(str, missing[:_MOST_NAMED])) + (", ..." * (len(missing) > _MOST_NAMED))
                found = f"{len(missing)} of {num_prompts} results are missing: of prompts {named}"
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
        """Close the files, and remove a file to which nothing was written."""
        if self._held and not self._num_bytes:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
                if self._rank == 0 and not _part_files(self.folder):
                    _remove_parts(self.folder)
        self._let_go()

    def _let_go(self) -> None:
        while self._held:
            self._held.pop().close()

    def _not_shared(self, found: str, exit_code: int = EXIT_USAGE) -> UserError:
        return UserError(
            "generate-out-not-shared",
            "not every rank sees the folder of the results",
            found=f"{self.folder}: {found}",
            why="each rank writes its results there, and rank 0 merges them",
            fix="name a file on a file system that all nodes share; results so far are kept, and the same "
            "command resumes",
            exit_code=exit_code,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def not_writable(path: Path, error: OSError) -> UserError:
    """Return the error for results that can't be written."""
    return UserError(
        "generate-out-not-writable",
        "the results can't be written",
        found=f"{error.strerror}: {path}",
        why="each result is written immediately, beside the file that they are merged into at the end",
        fix="name a file in an existing, writable folder with enough space; results so far are kept, and "
        "the same command resumes",
    )


def _check(out: Path, *, fingerprint: str, resume: bool) -> None:
    check_free(out)
    folder = parts_folder(out)
    if not os.path.lexists(folder):
        return
    if not _is_ours(folder):
        raise UserError(
            "generate-parts-not-zerofits",
            "the folder for unfinished results has other contents",
            found=f"{folder}: it has no job.json of `zerofit generate`",
            why="results are kept there until all are done, and the folder is removed then",
            fix="write the results to another file, or move that folder away",
        )
    if not _has_results(folder):
        return
    if not _is_claimed(folder, fingerprint):
        is_readable = _read_job(folder)["version"] == _VERSION
        made = "they are from another model, other prompts or other settings"
        raise UserError(
            "generate-other-parts",
            "the unfinished results are from another run",
            found=f"{folder}: {made if is_readable else 'another version of zerofit wrote them'}",
            why="the file would mix results of two runs",
            fix="write the results to another file, or, if you don't need the unfinished ones: "
            f"rm -r {folder}",
        )
    if not resume:
        raise UserError(
            "generate-parts-exist",
            "there are unfinished results of an earlier run",
            found=str(folder),
            why="they are only continued with resume=True",
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
        return  # a file system without locks: each start writes its own files, so that nothing is lost
    if not is_there:
        raise UserError(
            "generate-out-in-use",
            "another run is writing these results",
            found=f"{folder / _JOB} is locked by a living process",
            why="two runs would generate each prompt twice",
            fix="wait for it, end it, or write the results to another file",
        )


def _read_job(folder: Path) -> dict[str, Any]:
    """Return the content of the job file; empty if there is none of ours."""
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
    """Return True if a folder is one of parts, or was left by a run killed before it wrote its job file."""
    if not folder.is_dir() or _read_job(folder):
        return folder.is_dir()
    job = folder / _JOB
    return os.listdir(folder) in ([], [_JOB]) and not (job.exists() and job.stat().st_size)


def _has_results(folder: Path) -> bool:
    return folder.is_dir() and any(path.stat().st_size for path in _part_files(folder).values())


def _part_files(folder: Path) -> dict[tuple[int, int], Path]:
    """Return the existing files of all ranks of all starts, by (start, rank), sorted."""
    matched = ((_PART.fullmatch(path.name), path) for path in folder.iterdir())
    return dict(sorted(((int(name[1]), int(name[2])), path) for name, path in matched if name))


def _remove_parts(folder: Path) -> None:
    """Remove the files written by runs; keep other files, and the folder if there are any."""
    with contextlib.suppress(OSError):
        for path in (*_part_files(folder).values(), folder / _WHOLE, folder / _JOB):
            path.unlink(missing_ok=True)
        folder.rmdir()


def _line(document: Document) -> bytes:
    """Return a document's line: unescaped, or escaped if its text is not valid Unicode."""
    try:
        return f"{json.dumps(document, ensure_ascii=False)}\n".encode()
    except UnicodeEncodeError:
        return f"{json.dumps(document)}\n".encode()


def _lines_of(paths: Iterable[Path]) -> dict[int, bytes]:
    """Return the lines of some files by prompt index; of duplicates, the first counts.

    Incomplete lines, which a killed run leaves, and invalid ones, which a power failure leaves, are ignored.
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
