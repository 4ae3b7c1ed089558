"""Results on disk as they are made: a JSONL file for each rank beside OUT, merged in order at the end.

The first line of OUT.rank0.jsonl, OUT.rank1.jsonl and so on identifies the run; the others are results. Each
is on disk before the next call begins. A killed run leaves at most one incomplete line in each file, and the
next start appends to them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.atomic_file import write_whole
from zerofit.core.errors import EXIT_USAGE, UserError
from zerofit.core.own_file import OwnDescriptor
from zerofit.generation.generation_job import Completion, FinishReason, Generated

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerofit.generation.request import GenerationRequest
    from zerofit.ranks.exchange import Ranks

Document = Mapping[str, Any]
"""The results of one prompt as JSON; "index" is the prompt's index."""

_HEAD = b'{"zerofit_run": '
_MOST_NAMED = 5
"""ASSUMPTION: enough prompts to see which are missing; more would hide the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptResults:
    """The results that earlier starts left in the ranks' files."""

    lines: dict[int, bytes]
    """By prompt index; of duplicates, which a rank that outlives its launcher may make, the first."""
    batch_size: int | None
    """Prompts per call, which sampled tokens depend on; None if there are no results."""


def kept_results(out: Path) -> KeptResults:
    """Return the results of earlier starts.

    Raises:
        OSError: they can't be read.
    """
    parts = [part for path in _rank_files(out) if (part := _read(path)).lines]
    lines: dict[int, bytes] = {}
    for part in parts:
        lines = {**part.lines, **lines}
    return KeptResults(lines=lines, batch_size=parts[0].batch_size if parts else None)


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


def check_results(out: Path, *, run: str, resume: bool) -> None:
    """Check, without writing, that a run can begin or continue at a path.

    Args:
        run: a fingerprint of everything that determines the results.

    Raises:
        UserError: there are files of another kind or of another run, or a run is writing them.
        OSError: they can't be read.
    """
    check_free(out)
    with contextlib.suppress(FileNotFoundError):
        _rank_file(out, 0).lstat()  # fails for a name that is too long
    for path in _rank_files(out):
        _check(_read(path), run=run, resume=resume)
        with path.open("rb") as file:
            _lock(file.fileno(), path, how=fcntl.LOCK_SH)


class RankFile:
    """One rank's results on disk; a context manager.

    Raises:
        UserError: the file is of another kind or run, another process writes it, or it can't be written.
    """

    def __init__(self, out: Path, *, run: str, rank: int, resume: bool, batch_size: int) -> None:
        check_free(out)
        self.path = _rank_file(out, rank)
        try:
            number = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            self._file = OwnDescriptor(number)
            try:
                _lock(self._file.number, self.path, how=fcntl.LOCK_EX)
                part = _read(self.path)
                _check(part, run=run, resume=resume)
                is_this_run = part.run == run
                self._num_bytes = part.num_bytes if is_this_run else 0
                os.ftruncate(self._file.number, self._num_bytes)  # an incomplete line at the end
            except BaseException:
                self._file.close()
                raise
        except OSError as error:
            raise not_writable(self.path, error) from None
        self._is_empty = not part.lines
        if not is_this_run:
            self._append(_line({"zerofit_run": run, "batch_size": batch_size}))

    def write(self, documents: Iterable[Document]) -> None:
        """Write documents, one line each; they are on disk when this returns.

        Raises:
            UserError: the disk is full or not writable; earlier documents are kept.
        """
        for document in documents:
            self._append(_line(document))
            self._is_empty = False

    def _append(self, line: bytes) -> None:
        rest = memoryview(line)
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
            raise not_writable(self.path, error) from None
        self._num_bytes += len(line)

    def __enter__(self) -> RankFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_empty:
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)
        self._file.close()


def merge(
    out: Path, num_prompts: int, *, describe: Callable[[dict[str, Any]], Document] | None = None
) -> None:
    """Write all results to OUT atomically, in the order of the prompts; then remove the ranks' files.

    Args:
        describe: returns what OUT gets of a document; None for the document itself.

    Raises:
        UserError: a result is missing, OUT exists by now, or it can't be written; the ranks' files are kept.
    """
    try:
        lines = kept_results(out).lines
        missing = [index for index in range(num_prompts) if index not in lines]
        if missing:
            named = ", ".join(map(str, missing[:_MOST_NAMED])) + (", ..." * (len(missing) > _MOST_NAMED))
            found = f"{out}: {len(missing)} of {num_prompts} results are missing: of prompts {named}"
            raise _not_shared(found, exit_code=1)
        ordered = (lines[index] for index in range(num_prompts))
        check_free(out)
        write_whole(
            out,
            b"".join(line if describe is None else _line(describe(json.loads(line))) for line in ordered),
            sync=True,
        )
    except OSError as error:
        raise not_writable(out, error) from None
    for path in _rank_files(out):
        with contextlib.suppress(OSError):
            path.unlink()


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


class Results:
    """One rank's results, and those on disk of an earlier start."""

    def __init__(self, ranks: Ranks, request: GenerationRequest, file: RankFile | None, kept: KeptResults):
        self._ranks = ranks
        self._request = request
        self._file = file
        self._kept = kept
        self._found: list[Generated] = []

    def has_all(self, indices: Iterable[int]) -> bool:
        """Return True if an earlier start left the results of all these prompts."""
        return self._kept.lines.keys() >= set(indices)

    def keep(self, found: Sequence[Generated]) -> None:
        """Store results of this rank; they are on disk when this returns."""
        new = [result for result in found if result.index not in self._kept.lines]
        if self._file is not None:
            self._file.write(map(to_document, new))
        self._found += new

    def finish(self) -> list[Generated]:
        """Return the results for this rank, in order, when all ranks have finished.

        Raises:
            UserError: the file can't be written; the ranks' files are kept.
        """
        request, is_first = self._request, self._ranks.rank == 0
        own = list(self._found)
        if is_first:
            own += [from_document(json.loads(line)) for line in self._kept.lines.values()]
        self._ranks.agreed(lambda: self._merge() if is_first else None)
        shared = self._ranks.share_all(own)
        everything = sorted((result for part in shared for result in part), key=lambda result: result.index)
        begin = request.own.start
        return [
            replace(result, index=result.index - begin)
            for result in everything
            if result.index in request.own
        ]

    def _merge(self) -> None:
        options = self._request.options
        if options.out is not None:
            merge(options.out, len(self._request.prompts), describe=options.describe)


@contextmanager
def open_results(ranks: Ranks, request: GenerationRequest) -> Iterator[Results]:
    """Open the results of all ranks; all of them enter this context."""
    out, resume = request.options.out, request.options.resume
    nothing = KeptResults(lines={}, batch_size=None)
    if out is None:
        yield Results(ranks, request, None, nothing)
        return
    # Rank 0's: nodes with copies of the model have files of different times.
    run = ranks.share(request.options.fingerprint or request.fingerprint())[0]
    # Before any rank opens a file, and as rank 0 sees it: a killed run's rank may live on for a moment.
    seen = ranks.agreed(lambda: _checked(out, run, resume=resume) if ranks.rank == 0 else nothing)
    kept = ranks.share(seen)[0]

    def open_file() -> RankFile:
        file = RankFile(out, run=run, rank=ranks.rank, resume=resume, batch_size=request.batch_size)
        return stack.enter_context(file)

    with ExitStack() as stack:
        file = ranks.agreed(open_file)
        ranks.agreed(lambda: _check_shared(out, ranks.size) if ranks.rank == 0 else None)
        yield Results(ranks, request, file, kept)


def _checked(out: Path, run: str, *, resume: bool) -> KeptResults:
    try:
        check_results(out, run=run, resume=resume)
        return kept_results(out)
    except OSError as error:
        raise not_writable(out, error) from None


def _check_shared(out: Path, num_ranks: int) -> None:
    """Check that this rank sees the files of all ranks."""
    for rank in range(num_ranks):
        path = _rank_file(out, rank)
        if not path.exists():
            raise _not_shared(f"{path}: rank {rank} made it, rank 0 does not see it")


def to_document(result: Generated) -> Document:
    """Return a result as JSON document."""
    return {
        "index": result.index,
        "num_prompt_tokens": result.num_prompt_tokens,
        "completions": [
            {
                "text": completion.text,
                "finish_reason": str(completion.finish_reason),
                "num_new_tokens": len(completion.tokens),
                "tokens": list(completion.tokens),
            }
            for completion in result.completions
        ],
    }


def from_document(document: dict[str, Any]) -> Generated:
    """Return the result in a document of to_document()."""
    completions = tuple(
        Completion(
            tokens=tuple(completion["tokens"]),
            text=completion["text"],
            finish_reason=FinishReason(completion["finish_reason"]),
        )
        for completion in document["completions"]
    )
    return Generated(
        index=document["index"], num_prompt_tokens=document["num_prompt_tokens"], completions=completions
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One rank's file as it is."""

    path: Path
    is_ours: bool
    run: str | None
    """None if there is no complete first line."""
    batch_size: int | None
    lines: dict[int, bytes]
    num_bytes: int
    """Without an incomplete line at the end."""


def _read(path: Path) -> _Part:
    """Return a rank's file without lines that are incomplete, as a killed run leaves them, or invalid."""
    content = path.read_bytes()
    head, newline, rest = content.partition(b"\n")
    document = _parsed(head) if newline else {}
    lines: dict[int, bytes] = {}
    for line in rest.splitlines(keepends=True):
        index = _parsed(line).get("index") if line.endswith(b"\n") else None
        if type(index) is int and index >= 0:
            lines.setdefault(index, line)
    return _Part(
        path=path,
        is_ours="zerofit_run" in document if newline else head.startswith(_HEAD) or _HEAD.startswith(head),
        run=document.get("zerofit_run"),
        batch_size=document.get("batch_size"),
        lines=lines,
        num_bytes=content.rfind(b"\n") + 1,
    )


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        document = json.loads(line)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _check(part: _Part, *, run: str, resume: bool) -> None:
    """Check that a rank's file may be continued, or overwritten as it has no results."""
    if not part.is_ours:
        raise UserError(
            "generate-parts-not-zerofits",
            "a file with the name of a rank's results has other contents",
            found=f"{part.path}: its first line is not that of `zerofit generate`",
            why="a rank would write its results there, until all are merged",
            fix="write the results to another file, or move that one away",
        )
    if not part.lines:
        return
    if part.run != run:
        raise UserError(
            "generate-other-parts",
            "the unfinished results are from another run",
            found=f"{part.path}: they are from another model, other prompts or other settings",
            why="the file would mix results of two runs",
            fix=f"write the results to another file, or, if you don't need these: rm {part.path}",
        )
    if not resume:
        raise UserError(
            "generate-parts-exist",
            "there are unfinished results of an earlier run",
            found=str(part.path),
            why="they are only continued with resume=True",
            fix=f"pass resume=True, write to another file, or, if you don't need them: rm {part.path}",
        )


def _lock(number: int, path: Path, *, how: int) -> None:
    """Lock a rank's open file, which ends with the process in any case."""
    try:
        fcntl.flock(number, how | fcntl.LOCK_NB)
        # Between opening and locking, the run that had the lock may have ended and removed the file.
        is_there = os.path.samestat(os.fstat(number), os.stat(path))
    except (BlockingIOError, FileNotFoundError):
        is_there = False
    except OSError:
        return  # a file system without locks
    if not is_there:
        raise UserError(
            "generate-out-in-use",
            "another run is writing these results",
            found=f"{path} is locked by a living process",
            why="two runs would generate each prompt twice",
            fix="wait for it, end it, or write the results to another file",
        )


def _not_shared(found: str, exit_code: int = EXIT_USAGE) -> UserError:
    return UserError(
        "generate-out-not-shared",
        "not every rank's results are where rank 0 looks for them",
        found=found,
        why="each rank writes its own beside the file, and rank 0 merges them",
        fix="name a file on a file system that all nodes share; results so far are kept, and the same "
        "command resumes",
        exit_code=exit_code,
    )


def _rank_file(out: Path, rank: int) -> Path:
    return out.parent / f"{out.name}.rank{rank}.jsonl"


def _rank_files(out: Path) -> list[Path]:
    """Return the existing files of all ranks of all starts."""
    pattern = re.compile(re.escape(out.name) + r"\.rank(\d+)\.jsonl")
    names = os.listdir(out.parent) if out.parent.is_dir() else []
    matched = ((pattern.fullmatch(name), name) for name in names)
    return [
        out.parent / name for _, name in sorted((int(found[1]), name) for found, name in matched if found)
    ]


def _line(document: Document) -> bytes:
    """Return a document's line: unescaped, or escaped if its text is not valid Unicode."""
    try:
        return f"{json.dumps(document, ensure_ascii=False)}\n".encode()
    except UnicodeEncodeError:
        return f"{json.dumps(document)}\n".encode()
