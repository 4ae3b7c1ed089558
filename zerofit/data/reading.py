"""Reads a dataset's files in batches of rows: jsonl, json, csv, tsv, txt, parquet and arrow.

Nothing is converted or cached, and memory does not grow with the file. `datasets` reads the same formats,
but imports torch for streaming and does not report its position in a file.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError, first_line
from zerofit.core.json_text import parse_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

TEXT_ENDINGS = (".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".txt")
ENDINGS = (*TEXT_ENDINGS, ".parquet", ".arrow")
"""Supported file extensions; text files may have .gz appended."""
HEAD_ROWS = 100
"""Rows used to determine the kinds of columns. ASSUMPTION: enough to meet each kind of value."""
BATCH_ROWS = 1000
"""Maximum rows of a batch. ASSUMPTION: a compromise between memory and speed."""
_BATCH_BYTES = 8 * 2**20
"""Maximum bytes of the file in a batch. ASSUMPTION: Python's values take several times that."""
_ARROW_MAGIC = b"ARROW1"
"""First bytes of Arrow's file format; its stream format differs.
https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format"""
_MAX_LINE_SHOWN = 60
"""Maximum characters shown of an invalid line."""
_JSON_WHY = "a JSON dataset has one object per line, or one list of objects"
_JSON_FIX = "fix that line, or store the dataset again"
_READ_ERRORS = (OSError, EOFError, ValueError, RecursionError, NotImplementedError, zlib.error)
"""Exceptions of gzip, json, pandas and pyarrow; most of their own are ValueErrors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch:
    """Consecutive rows of a file, by column."""

    columns: tuple[Sequence[Any], ...]
    """One for each requested column: lists, or pyarrow arrays."""
    bytes_read: int
    """Bytes of the file on disk up to the end of these rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One file of a dataset."""

    path: Path
    kind: str
    """One of ENDINGS."""

    @property
    def size_bytes(self) -> int:
        """Size on disk."""
        return self.path.stat().st_size

    def head(self) -> dict[str, list[Any]]:
        """Return the first rows' values by column; empty if the file has no rows.

        Raises:
            UserError: the file can't be read.
        """
        columns: dict[str, list[Any]] = {}
        with _readable(self.path):
            if self.kind in TEXT_ENDINGS:
                with _opened(self.path) as (stream, _):
                    for row in itertools.islice(_text_rows(self, stream), HEAD_ROWS):
                        for name, value in row.items():
                            columns.setdefault(name, []).append(value)
            else:
                first = next((batch for batch, _ in _arrow_batches(self, None) if batch.num_rows), None)
                if first is not None:
                    columns = first.slice(0, HEAD_ROWS).to_pydict()
        return columns

    def batches(self, columns: Sequence[str]) -> Iterator[RowBatch]:
        """Yield all rows; None where a row lacks a column.

        Raises:
            UserError: the file can't be read, or its first rows have none of the columns.
        """
        names = self.head()
        if not names:
            return
        if missing := [name for name in columns if name not in names]:
            raise _broken(
                self.path,
                f"no column {', '.join(missing)}",
                why=f"its columns are {', '.join(names)}, and the files of a dataset have the same",
                fix="leave the file out, or give all files the same columns",
            )
        with _readable(self.path):
            if self.kind in TEXT_ENDINGS:
                yield from self._batches_of_text(columns)
            else:
                for batch, bytes_read in _arrow_batches(self, list(columns)):
                    for start in range(0, batch.num_rows, BATCH_ROWS):
                        rows = batch.slice(start, BATCH_ROWS)
                        yield RowBatch(
                            columns=tuple(rows.column(name) for name in columns), bytes_read=bytes_read
                        )

    def _batches_of_text(self, columns: Sequence[str]) -> Iterator[RowBatch]:
        with _opened(self.path) as (stream, raw):
            values: tuple[list[Any], ...] = tuple([] for _ in columns)
            begun_at = 0
            for row in _text_rows(self, stream):
                for name, column in zip(columns, values, strict=True):
                    column.append(row.get(name))
                if len(values[0]) == BATCH_ROWS or raw.tell() - begun_at > _BATCH_BYTES:
                    begun_at = raw.tell()
                    yield RowBatch(columns=values, bytes_read=begun_at)
                    values = tuple([] for _ in columns)
            if values[0]:
                yield RowBatch(columns=values, bytes_read=self.size_bytes)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Any]]:
    """Open a text file; yield its decompressed stream, and its raw stream."""
    with path.open("rb") as raw:
        yield gzip.GzipFile(fileobj=raw) if path.suffix.lower() == ".gz" else raw, raw


def _text_rows(file: DataFile, stream: Any) -> Iterator[dict[str, Any]]:
    if file.kind in (".csv", ".tsv"):
        yield from _table_rows(stream, "\t" if file.kind == ".tsv" else ",")
        return
    lines = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="\n")
    if file.kind == ".txt":  # one column, "text", as in datasets' text loader
        for line in lines:
            yield {"text": line.rstrip("\r\n")}
        return
    first = next((line for line in lines if not line.isspace()), "")
    if file.kind == ".json" and first.lstrip().startswith("["):
        for number, row in enumerate(parse_json(first + lines.read()), 1):
            if not isinstance(row, dict):
                raise ValueError(f"entry {number} of the list is not an object: {row!r:.{_MAX_LINE_SHOWN}}")
            yield row
        return
    lines.seek(0)
    yield from _json_lines(file.path, lines)


def _json_lines(path: Path, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        if line.isspace():
            continue
        try:
            row = parse_json(line)
            problem = "" if isinstance(row, dict) else "no object"
        except json.JSONDecodeError as error:
            problem = error.msg[:1].lower() + error.msg[1:]
        if problem:
            shown = line.strip()
            shown = shown if len(shown) <= _MAX_LINE_SHOWN else f"{shown[:_MAX_LINE_SHOWN]} ..."
            raise _broken(path, f"line {number}: {problem}: {shown}", why=_JSON_WHY, fix=_JSON_FIX)
        yield row


def _table_rows(stream: Any, separator: str) -> Iterator[dict[str, Any]]:
    """Yield the rows below a header as parsed by pandas, which datasets' csv loader uses."""
    import pandas  # type: ignore[import-untyped]

    try:
        parts = pandas.read_csv(
            stream,
            sep=separator,
            dtype=str,
            keep_default_na=False,
            chunksize=BATCH_ROWS,
        )
    except pandas.errors.EmptyDataError:
        return
    for part in parts:
        names = [str(name) for name in part.columns]
        for values in part.fillna("").itertuples(index=False, name=None):
            yield dict(zip(names, values, strict=True))


def _arrow_batches(file: DataFile, columns: list[str] | None) -> Iterator[tuple[Any, int]]:
    """Yield pyarrow's record batches, and the bytes of the file read up to the end of each."""
    import pyarrow.ipc  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    if file.kind == ".parquet":
        table = pyarrow.parquet.ParquetFile(file.path, pre_buffer=False, buffer_size=2**20)
        groups = [table.metadata.row_group(number) for number in range(table.metadata.num_row_groups)]
        num_rows, num_bytes = table.metadata.num_rows, sum(group.total_byte_size for group in groups)
        size = max(1, min(10 * BATCH_ROWS, _BATCH_BYTES * num_rows // max(1, num_bytes)))
        done = 0
        for batch in table.iter_batches(batch_size=size, columns=columns, use_threads=False):
            done += batch.num_rows
            yield batch, file.size_bytes * done // max(1, num_rows)
        return
    # With plain reads: pages of a mapped file would count as memory of this process.
    with pyarrow.OSFile(str(file.path)) as stream:
        is_file_format = stream.read(len(_ARROW_MAGIC)) == _ARROW_MAGIC
        stream.seek(0)
        if is_file_format:
            reader = pyarrow.ipc.open_file(stream)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            batches = iter(pyarrow.ipc.open_stream(stream))
        for batch in batches:
            yield batch if columns is None else batch.select(columns), stream.tell()


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Convert a library's error on an unreadable file into a UserError."""
    try:
        yield
    except _READ_ERRORS as error:
        why, fix = "it is damaged, truncated, or not of the format that its name says", "store it again"
        if isinstance(error, UnicodeDecodeError):
            why = "text files must be UTF-8; this one is binary or in another encoding"
            fix = "save it as UTF-8, or rename it to the extension of its format"
        elif isinstance(error, json.JSONDecodeError):
            why, fix = _JSON_WHY, _JSON_FIX
        elif isinstance(error, OSError) and error.strerror:
            why, fix = "the system refuses it", "name another file"
        found = getattr(error, "strerror", None) or first_line(error)
        raise _broken(path, found.rstrip("."), why=why, fix=fix) from None


def _broken(path: Path, found: str, *, why: str, fix: str) -> UserError:
    return UserError(
        "data-file-broken", "a file of the dataset can't be read", found=f"{path}: {found}", why=why, fix=fix
    )
