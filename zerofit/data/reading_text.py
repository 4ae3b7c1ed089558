"""Readers of datasets that are text: jsonl, json and txt, be they gzipped; tables are in reading_csv.py."""

from __future__ import annotations

import gzip
import itertools
import json
import re
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from zerofit.data.reading import (
    BATCH_BYTES,
    BATCH_ROWS,
    HEAD_ROWS,
    MAX_ROW_BYTES,
    Batch,
    broken,
    row_too_long,
    without_column,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from zerofit.core.errors import UserError

_BOM = b"\xef\xbb\xbf"
_CHUNK = 2**20
_SHOWN = 60
"""Characters of a broken line that are shown."""
_NAMED = 8
"""Names that are shown of an object."""


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
        self.num_bytes = 0
        """Of the text that was read so far, unpacked."""
        self.last = ""
        """The last line."""
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
            self.num_bytes += len(line)
            if len(line) > MAX_ROW_BYTES:
                raise row_too_long(self.path, self.number)
            self.last = self._decoded(line.removeprefix(_BOM) if self.number == 1 else line)
            yield self.last

    def more_text(self) -> str:
        """Return the next MiB or so, whatever its lines; "" at the file's end."""
        data: bytes = self._stream.read(_CHUNK)
        while data and data[-1] >= 0x80:  # not within a character
            more: bytes = self._stream.read(1)
            if not more:
                break
            data += more
        self.num_bytes += len(data)
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

    def is_at_end(self) -> bool:
        """Read what is left, and return whether it is blank."""
        while text := self.more_text():
            if not text.isspace():
                return False
        return True

    def invalid_json(self, reason: str, number: int, line: str) -> UserError:
        """Return what is said of a line that is no row of JSON."""
        shown = line.strip()
        shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + " ..."
        return broken(
            self.path,
            f"line {number}: {reason}: {shown}",
            why="a dataset in JSON holds one object a line, or one list of objects",
            fix="mend that line, or store the dataset anew",
        )

    def one_object(self, found: str) -> UserError:
        """Return what is said of a file that is one object, not a list of them."""
        return broken(
            self.path,
            found,
            why="it is one object, and a dataset in JSON holds one object a line, or one list of objects",
            fix="store the list of its rows by itself, one object a line: datasets.Dataset.to_json does it",
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
            begun_at = 0
            for row in self._checked_rows(lines, columns):
                for name, column in zip(columns, values, strict=True):
                    column.append(row.get(name))
                if len(values[0]) == BATCH_ROWS or lines.num_bytes - begun_at > BATCH_BYTES:
                    yield Batch(columns=values, bytes_read=lines.bytes_read)
                    values, begun_at = tuple([] for _ in columns), lines.num_bytes
            if values[0]:
                yield Batch(columns=values, bytes_read=lines.bytes_read)

    def _checked_rows(self, lines: Lines, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield all rows.

        Raises:
            UserError: none of the first ones has a column, which the first file has among as many.
        """
        missing, names, number = set(columns), dict[str, None](), 0
        for number, row in enumerate(self.rows(lines), 1):
            if missing and number <= HEAD_ROWS:
                missing -= row.keys()
                names |= dict.fromkeys(row)
                if missing and number == HEAD_ROWS:
                    break
            yield row
        if missing and number:
            raise without_column(self.path, columns, tuple(names))


def txt_rows(lines: Lines) -> Iterator[dict[str, Any]]:
    """Yield a row for each line, in the column "text", as datasets' loader for text does."""
    for line in lines:
        yield {"text": line.rstrip("\r\n")}


def jsonl_rows(lines: Lines) -> Iterator[dict[str, Any]]:
    """Yield the object of each line."""
    is_first = True
    for line in lines:
        if line.isspace():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if is_first and _is_cut_object(line, error):
                raise lines.one_object(f"line {lines.number} opens an object and does not close it") from None
            raise lines.invalid_json(_reason(error), lines.number, line) from None
        is_first = False
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
    return _unless_by_columns(lines)


def _unless_by_columns(lines: Lines) -> Iterator[dict[str, Any]]:
    """Yield the object of each line.

    Raises:
        UserError: there is one, which holds a dataset by columns, or its rows under a name.
    """
    rows = jsonl_rows(lines)
    first = list(itertools.islice(rows, 2))
    if len(first) == 1 and _holds_rows(first[0]):
        raise lines.one_object(f"one object with {', '.join(list(first[0])[:_NAMED])}")
    yield from first
    yield from rows


def _listed_rows(lines: Lines, text: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of one list, of which a MiB is held at a time, or as much as one object has."""
    decoder = json.JSONDecoder()
    place, lines_before, is_first = text.index("[") + 1, 0, True
    while True:
        found = _NEXT.match(text, place)
        assert found is not None
        comma, end = found[1], found.end()
        if end < len(text) and (text[end] == "]" or bool(comma) is is_first):
            if text[end] == "]" and not comma:
                behind = text[end + 1 :]
                if (behind and not behind.isspace()) or not lines.is_at_end():
                    line = lines_before + _line(text, end)
                    raise lines.invalid_json("more stands behind the list", line, behind)
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


def _holds_rows(row: dict[str, Any]) -> bool:
    """Return whether an object is a dataset, not a sample, which has a text beside its lists."""
    values = list(row.values())
    if values and all(isinstance(value, list | dict) for value in values):
        return True
    has_text = any(isinstance(value, str) and " " in value.strip() for value in values)
    lists = (value for value in values if isinstance(value, list))
    return not has_text and any(isinstance(one, dict) for value in lists for one in value[:1])


def _is_cut_object(line: str, error: Exception) -> bool:
    """Return whether a line is the beginning of an object that goes on in the next."""
    is_end = isinstance(error, json.JSONDecodeError) and error.pos >= len(line.rstrip())
    return is_end and line.lstrip().startswith("{")


def _line(text: str, place: int) -> int:
    return 1 + text.count("\n", 0, place)


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return error.msg[:1].lower() + error.msg[1:]
    return "values nested too deep"
