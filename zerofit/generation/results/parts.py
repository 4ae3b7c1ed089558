"""Results on disk as they come: one file a rank and start beside OUT, put together when all are done.

`OUT.parts/` holds `job.json`, which says whose results they are and is locked while a run writes them, and
`start2-rank0.jsonl` and so on, which only ever grow. A run that is killed leaves at most a half line at the
end of each; the next start reads all whole lines, and writes files of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import IO, TYPE_CHECKING, Any, Self

from zerofit.generation.results.errors import incomplete, not_shared, not_writable, out_exists
from zerofit.generation.results.folder import (
    claim,
    is_claimed,
    name_whole,
    part_file,
    part_files,
    parts_folder,
    remove_parts,
    sync_folder,
    whole_file,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path


class Parts:
    """One rank's hold on the unfinished results of a run: open() it, and use it as a context manager.

    Rank 0 opens first, the others after it has.
    """

    def __init__(
        self, out: Path, *, rank: int, world_size: int, start: int, file: int, lock: int | None
    ) -> None:
        self.out = out
        self.folder = parts_folder(out)
        self._rank = rank
        self._world_size = world_size
        self._start = start
        self._file = file
        self._num_bytes = 0
        self._held = [file] if lock is None else [file, lock]

    @classmethod
    def open(
        cls,
        out: Path,
        *,
        fingerprint: str,
        rank: int,
        world_size: int,
        resume: bool,
        batch_size: int | None = None,
    ) -> Parts:
        """Return a rank's parts, to be written into a new file.

        Args:
            out: the file that gets all results at the end.
            fingerprint: of all that decides about the results: model, prompts, settings.
            rank: this one, of world_size.
            world_size: ranks that write.
            resume: whether unfinished results of the same fingerprint are continued.
            batch_size: prompts in one call, noted beside the results.

        Raises:
            UserError: something is at `out`; the unfinished results there are not of this fingerprint, not to
                be continued, or being written; the folder can't be written, or isn't seen by this rank.
        """
        folder = parts_folder(out)
        lock = None
        try:
            if rank == 0:
                lock = claim(out, fingerprint=fingerprint, resume=resume, batch_size=batch_size)
            elif not is_claimed(folder, fingerprint=fingerprint):
                raise not_shared(folder, rank=rank)
            start = max((start for start, _ in part_files(folder)), default=0) + (rank == 0)
            path = part_file(folder, start=start, rank=rank)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
            sync_folder(folder)
        except OSError as error:
            if lock is not None:
                os.close(lock)
            raise not_writable(folder, error) from None
        return cls(out, rank=rank, world_size=world_size, start=start, file=file, lock=lock)

    @cached_property
    def done(self) -> PartLines:
        """Documents of the prompts that earlier starts have done, by index, as of the first look.

        Take rank 0's for all ranks: a rank of an earlier start may live on for a moment, so that two looks
        differ.
        """
        files = part_files(self.folder).items()
        return PartLines([path for (start, _), path in files if start < self._start])

    def check_ranks(self) -> None:
        """Check on rank 0 that it sees the files of all ranks, once all have opened theirs.

        Raises:
            UserError: it does not.
        """
        files = part_files(self.folder)
        for rank in range(self._world_size):
            if (self._start, rank) not in files:
                raise not_shared(self.folder, rank=rank)

    def write(self, documents: Iterable[Document]) -> None:
        """Write documents, one line each; they are on the disk when this returns.

        Raises:
            UserError: the disk is full, or can't be written; what was written before stays.
        """
        lines = b"".join(map(_line, documents))
        try:
            _write_all(self._file, lines)
            os.fsync(self._file)  # 0.2 ms on an SSD with ext4: little beside a batch, which takes 50 and more
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._num_bytes)
            raise not_writable(self._path, error) from None
        self._num_bytes += len(lines)

    def assemble(
        self, num_prompts: int, *, describe: Callable[[dict[str, Any]], Document] | None = None
    ) -> None:
        """Put all results into OUT, in input order, whole or not at all; then the parts go.

        On rank 0 only, when all ranks have written theirs.

        Args:
            num_prompts: all of them.
            describe: gives what OUT gets of a document; None for the documents as they are.

        Raises:
            UserError: a result is missing, something is at OUT by now, or it can't be written; the parts
                stay.
        """
        try:
            lines = PartLines(list(part_files(self.folder).values()))
            missing = [index for index in range(num_prompts) if index not in lines]
            if missing:
                raise incomplete(self.folder, missing=missing, num_prompts=num_prompts)
            with contextlib.closing(lines), whole_file(self.folder).open("wb") as whole:
                for index in range(num_prompts):
                    whole.write(_line(describe(lines[index])) if describe else lines.line(index))
                whole.flush()
                os.fsync(whole.fileno())
            name_whole(whole_file(self.folder), self.out)
        except FileExistsError:
            raise out_exists(self.out) from None
        except OSError as error:
            raise not_writable(self.out, error) from None
        remove_parts(self.folder)

    def close(self) -> None:
        """Let go of the files; what was written stays, and where nothing was, nothing is left."""
        if "done" in self.__dict__:
            self.done.close()
        if self._held and not self._num_bytes:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
                if self._rank == 0 and not part_files(self.folder):
                    remove_parts(self.folder)
        while self._held:
            os.close(self._held.pop())

    @property
    def _path(self) -> Path:
        return part_file(self.folder, start=self._start, rank=self._rank)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _line(document: Document) -> bytes:
    """Return a document's line: readable, or escaped where its text is no valid Unicode."""
    try:
        return f"{json.dumps(document, ensure_ascii=False)}\n".encode()
    except UnicodeEncodeError:
        return f"{json.dumps(document)}\n".encode()


def _write_all(file: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(file, rest) :]


Document = Mapping[str, Any]
"""What is kept of one prompt; its place among all is its "index"."""

_ABSENT = -1
_MOST_OPEN = 128
"""ASSUMPTION: of the 1024 files that a process may usually open (RLIMIT_NOFILE), so many are to spare."""


class PartLines(Mapping[int, dict[str, Any]]):
    """The documents in some JSONL files by the index of their prompt; where two have one, the first counts.

    A line without an end is what a killed run leaves, and is no line; so is one that holds no document, which
    a machine leaves that lost its power. Memory: 8 bytes a prompt.

    Args:
        paths: the files, in their order.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._open: dict[int, IO[bytes]] = {}
        self._begins = [0]
        """Of each file, were all written one behind the other; then the place behind the last."""
        self._places = array("q")
        """Of each prompt's line, likewise."""
        self._num_documents = 0
        for path in paths:
            self._begins.append(self._add(path, self._begins[-1]))

    def __getitem__(self, index: int) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.line(index))
        return document

    def __iter__(self) -> Iterator[int]:
        return (index for index, place in enumerate(self._places) if place != _ABSENT)

    def __len__(self) -> int:
        return self._num_documents

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and self._place(index) != _ABSENT

    def line(self, index: int) -> bytes:
        """Return the line of a prompt, with its end, as it stands in its file."""
        place = self._place(index)
        if place == _ABSENT:
            raise KeyError(index)
        number = bisect_right(self._begins, place) - 1
        file = self._file(number)
        file.seek(place - self._begins[number])
        return file.readline()

    def close(self) -> None:
        """Close the files; they are opened again when they are needed."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _place(self, index: int) -> int:
        return self._places[index] if 0 <= index < len(self._places) else _ABSENT

    def _file(self, number: int) -> IO[bytes]:
        if number not in self._open:
            if len(self._open) == _MOST_OPEN:
                self.close()
            self._open[number] = self._paths[number].open("rb")
        return self._open[number]

    def _add(self, path: Path, place: int) -> int:
        """Note the lines of a file that begins at a place, and return the place behind it."""
        with path.open("rb") as file:
            for line in file:
                index = _index(line)
                if index is not None and index not in self:
                    self._places.extend([_ABSENT] * (index + 1 - len(self._places)))
                    self._places[index] = place
                    self._num_documents += 1
                place += len(line)
        return place


def _index(line: bytes) -> int | None:
    """Return the index of a line's document; None where it holds none, or has no end."""
    try:
        document = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    index = document.get("index") if isinstance(document, dict) else None
    return index if type(index) is int and index >= 0 else None
