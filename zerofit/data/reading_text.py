"""Readers of datasets that are text: csv, tsv, jsonl, json and txt, be they gzipped."""

from __future__ import annotations

import csv
import gzip
import json
import re
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from zerofit.data.reading import BATCH_ROWS, HEAD_ROWS, MAX_ROW_BYTES, Batch, broken, row_too_long

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_BOM = b"\xef\xbb\xbf"
_CHUNK = 2**20
_SHOWN = 60
"""Characters of a broken line that are shown."""


class RowsOf(Protocol):
    """A format: lines to rows."""

    def __call__(self, lines: Lines) -> Iterator[dict[str, Any]]:
        """Yield each row's values by column."""


class Lines:
    """The lines of a text file, with the number of the last one that was read.

    Args:
        path: the file, gzipped where it ends in ".gz".
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = 0
        self._raw: Any = None
        self._stream: Any = None

    @contextmanager
    def opened(self) -> Iterator[Lines]:
        """Open the file for as long as the context.

        Raises:
            UserError: it can't be opened, or what is read of it meanwhile is damaged.
        """
        try:
            with self.path.open("rb") as raw:
                self._raw = raw
                is_gzip = self.path.suffix.lower() == ".gz"
                self._stream = gzip.GzipFile(fileobj=raw) if is_gzip else raw
                yield self
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise broken(
                self.path,
                str(error),
                why="its name ends in .gz, and gzip can't unpack it",
                fix="compress it anew, or name the file as what it is",
            ) from None
        except OSError as error:
            raise broken(
                self.path, error.strerror or str(error), why="the system refuses it", fix="name another file"
            ) from None

    @property
    def bytes_read(self) -> int:
        """Bytes of the file on disk that were read so far."""
        return int(self._raw.tell())

    def __iter__(self) -> Iterator[str]:
        while line := self._stream.readline(MAX_ROW_BYTES + 1):
            self.number += 1
            if len(line) > MAX_ROW_BYTES:
                raise row_too_long(self.path, self.number)
            yield self._decoded(line.removeprefix(_BOM) if self.number == 1 else line)

    def more_text(self) -> str:
        """Return the next MiB or so, whatever its lines; "" at the file's end."""
        data: bytes = self._stream.read(_CHUNK)
        while data and data[-1] >= 0x80:  # not within a character
            more: bytes = self._stream.read(1)
            if not more:
                break
            data += more
        return self._decoded(data.removeprefix(_BOM))

    def rewind(self) -> None:
        """Go back to the first line."""
        self._stream.seek(0)

    def _decoded(self, data: bytes) -> str:
        """Return bytes as text.

        Raises:
            UserError: they are none.
        """
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:
            raise broken(
                self.path,
                f"line {self.number} is no text in UTF-8" if self.number else "it is no text in UTF-8",
                why="text files are read as UTF-8, and this one is binary or in another encoding",
                fix="save it as UTF-8, or give it the ending of what it is",
            )
        return text

    def invalid_json(self, reason: str, number: int, line: str) -> Exception:
        """Return what is said of a line that is no row of JSON."""
        shown = line.strip()
        shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + " ..."
        return broken(
            self.path,
            f"line {number}: {reason}: {shown}",
            why="a dataset in JSON holds one object a line, or one list of objects",
            fix="mend that line, or store the dataset anew",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFile:
    """A dataset's file that is text."""

    path: Path
    rows: RowsOf

    @property
    def size_bytes(self) -> int:
        """On disk."""
        return self.path.stat().st_size

    def head(self) -> dict[str, list[Any]]:
        """Return the first rows' values by column."""
        columns: dict[str, list[Any]] = {}
        with Lines(self.path).opened() as lines:
            for number, row in enumerate(self.rows(lines)):
                if number == HEAD_ROWS:
                    break
                for name, value in row.items():
                    columns.setdefault(name, []).append(value)
        return columns

    def batches(self, columns: Sequence[str]) -> Iterator[Batch]:
        """Yield all rows; None stands where a row lacks a column."""
        with Lines(self.path).opened() as lines:
            values: tuple[list[Any], ...] = tuple([] for _ in columns)
            for row in self.rows(lines):
                for name, column in zip(columns, values, strict=True):
                    column.append(row.get(name))
                if len(values[0]) == BATCH_ROWS:
                    yield Batch(columns=values, bytes_read=lines.bytes_read)
                    values = tuple([] for _ in columns)
            if values[0]:
                yield Batch(columns=values, bytes_read=lines.bytes_read)


def txt_rows(lines: Lines) -> Iterator[dict[str, Any]]:
    """Yield a row for each line, in the column "text", as datasets' loader for text does."""
    for line in lines:
        yield {"text": line.rstrip("\r\n")}


def csv_rows(lines: Lines) -> Iterator[dict[str, Any]]:
    """Yield the rows below a header, with commas between values."""
    return _separated_rows(lines, ",")


def tsv_rows(lines: Lines) -> Iterator[dict[str, Any]]:
    """Yield the rows below a header, with tabs between values."""
    return _separated_rows(lines, "\t")


def _separated_rows(lines: Lines, delimiter: str) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(MAX_ROW_BYTES)
    reader = csv.reader(iter(lines), delimiter=delimiter)
    try:
        header = next((row for row in reader if row), [])
        for row in reader:
            if row:
                yield dict(zip(header, row, strict=False))
    except csv.Error as error:
        if "field limit" in str(error):
            raise row_too_long(lines.path, lines.number) from None
        raise broken(
            lines.path,
            f"line {lines.number}: {error}",
            why="it is no table of values with commas or tabs between",
            fix="store the dataset anew, with quotes around values that have line ends",
        ) from None


def jsonl_rows(lines: Lines) -> Iterator[dict[str, Any]]:
    """Yield the object of each line."""
    for line in lines:
        if line.isspace():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise lines.invalid_json(_reason(error), lines.number, line) from None
        if not isinstance(row, dict):
            raise lines.invalid_json("no object", lines.number, line)
        yield row


def json_rows(lines: Lines) -> Iterator[dict[str, Any]]:
    """Yield the objects of one list, or those of each line where the file begins with an object."""
    text = lines.more_text()
    while text.isspace() and (more := lines.more_text()):
        text += more
    if text.lstrip().startswith("["):
        return _listed_rows(lines, text)
    lines.rewind()
    return jsonl_rows(lines)


def _listed_rows(lines: Lines, text: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of one list, of which a MiB is held at a time, or as much as one object has."""
    decoder = json.JSONDecoder()
    place, lines_before, is_first = text.index("[") + 1, 0, True
    while True:
        found = _NEXT.match(text, place)
        assert found is not None
        comma, end = found[1], found.end()
        if end < len(text) and (text[end] == "]" or bool(comma) is is_first):
            if text[end] == "]" and not (comma and is_first):
                return
            raise lines.invalid_json("a comma stands wrong", lines_before + _line(text, end), text[place:])
        try:
            if end == len(text):
                raise json.JSONDecodeError("the list does not end", text, max(0, end - 1))
            row, place = decoder.raw_decode(text, end)
        except (ValueError, RecursionError) as error:
            more = lines.more_text() if _can_be_cut(error, len(text)) else ""
            if not more:
                at = getattr(error, "pos", end)
                raise lines.invalid_json(
                    _reason(error), lines_before + _line(text, at), text[text.rfind("\n", 0, at) + 1 :]
                ) from None
            lines_before += text.count("\n", 0, place)
            text, place = text[place:] + more, 0
            if len(text) > MAX_ROW_BYTES + 2 * _CHUNK:
                raise row_too_long(lines.path, lines_before + 1) from None
            continue
        if not isinstance(row, dict):
            raise lines.invalid_json("no object", lines_before + _line(text, end), text[end:])
        is_first = False
        yield row


_NEXT = re.compile(r"[ \t\r\n]*(,?)[ \t\r\n]*")
_SHORTEST_CUT = 16
"""Characters from the end of a text within which an error may come from its being cut off there."""


def _can_be_cut(error: Exception, length: int) -> bool:
    """Return whether more text could make it valid."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.pos >= length - _SHORTEST_CUT or error.msg.startswith("Unterminated string")


def _line(text: str, place: int) -> int:
    return 1 + text.count("\n", 0, place)


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return error.msg[:1].lower() + error.msg[1:]
    return "values nested too deep"
