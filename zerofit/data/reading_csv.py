"""Readers of tables that are text: csv and tsv, with quotes as in RFC 4180."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Any

from zerofit.data.reading import MAX_ROW_BYTES, broken, row_too_long

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from zerofit.core.errors import UserError
    from zerofit.data.reading_text import Lines


def csv_rows(lines: Lines) -> Iterator[dict[str, Any]]:
    """Yield the rows below a header, with commas between values."""
    return _separated_rows(lines, ",")


def tsv_rows(lines: Lines) -> Iterator[dict[str, Any]]:
    """Yield the rows below a header, with tabs between values."""
    return _separated_rows(lines, "\t")


def _separated_rows(lines: Lines, delimiter: str) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(MAX_ROW_BYTES)
    rows = _split_rows(lines, delimiter)
    header = _unlike(next((row for row in rows if row), []))
    for row in rows:
        if row:
            yield dict(zip(header, row, strict=False))


def _split_rows(lines: Lines, delimiter: str) -> Iterator[list[str]]:
    """Yield each row's values.

    Quotes are those of RFC 4180. Within one line others pass, as with Python's own reader; where they would
    join lines, rows would go missing without a word.
    """
    reader = csv.reader(iter(lines), delimiter=delimiter, strict=True)
    while True:
        first = lines.number + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "field limit" in str(error):
                raise row_too_long(lines.path, lines.number) from None
            if lines.number != first or lines.last.count('"') % 2:
                raise _open_quote(lines.path, first, lines.number) from None
            row = _loose(lines, delimiter)
        yield row


def _loose(lines: Lines, delimiter: str) -> list[str]:
    """Return the values of the last line, whose quotes are not those of RFC 4180."""
    try:
        return next(csv.reader([lines.last], delimiter=delimiter))
    except csv.Error as error:
        raise broken(
            lines.path,
            f"line {lines.number}: {error}",
            why="it is no table of values with commas or tabs between",
            fix="store the dataset anew, with quotes around values that have line ends",
        ) from None


def _open_quote(path: Path, first: int, last: int) -> UserError:
    return broken(
        path,
        f"line {first}: a value begins with a quote, which no quote before a separator or a line's end closes"
        + (f" up to line {last}" if last > first else ""),
        why="lines up to the next quote would become one value, and their rows go missing",
        fix='put quotes around values with quotes or line ends, and write their own twice: "a ""b"" c"',
    )


def _unlike(names: Sequence[str]) -> list[str]:
    """Return names of columns of which none comes twice: text and text.1, as pandas calls them."""
    found: dict[str, None] = {}
    for name in names:
        number, other = 0, name
        while other in found:
            number += 1
            other = f"{name}.{number}"
        found[other] = None
    return list(found)
