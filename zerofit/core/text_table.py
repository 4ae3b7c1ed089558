"""Tables as lines of text with aligned columns."""

from __future__ import annotations

import textwrap
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


_GAP = 2
_HANGING = 4
_LEAST_LAST = 24
"""Width to which the last cell shrinks before the others do."""
_LEAST = 8
"""Width to which any cell shrinks before words of the others are broken."""
_LEAST_FOLDED = 40
"""Minimum width of a wrapped last cell beside the others; if less is left, it goes below them."""


def table_lines(
    rows: Sequence[Sequence[str]], *, width: int | None = None, leaves_out: Sequence[int] = ()
) -> list[str]:
    """Return rows of cells as lines with aligned columns; cells that are too long are wrapped, never cut.

    Args:
        rows: the cells, the same number in each row.
        width: maximum columns of a line; None for unlimited.
        leaves_out: columns to leave out if the lines are too wide, the first one first.
    """
    kept = list(range(len(rows[0])))
    for column in leaves_out:
        if width is None or _width(rows, kept) <= width:
            break
        kept.remove(column)
    widths = [max(len(row[column]) for row in rows) for column in kept]
    if width is not None:
        _narrow(widths, by=sum(widths) + _GAP * (len(widths) - 1) - width)
    lines = []
    for row in rows:
        cells = [_wrapped_cell(row[column], size) for column, size in zip(kept, widths, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            padded = (f"{part:<{size}}" for part, size in zip(parts, widths, strict=True))
            lines.append((" " * _GAP).join(padded).rstrip())
    return lines


def folded_table_lines(rows: Sequence[Sequence[str]], *, width: int | None) -> list[str]:
    """Return rows of cells as lines with aligned columns, the last cell wrapped if the lines are too wide."""
    if width is None or _width(rows, range(len(rows[0]))) <= width:
        return table_lines(rows)
    before = table_lines([row[:-1] for row in rows])
    start = max(map(len, before)) + _GAP
    is_beside = width - start >= _LEAST_FOLDED
    indent = " " * (start if is_beside else 2 * _HANGING)
    lines = []
    for cells, row in zip(before, rows, strict=True):
        last = [*wrapped([indent + row[-1]], width, hanging=0)]
        if is_beside and last:
            cells = f"{cells:<{start}}{last.pop(0).lstrip()}".rstrip()
        lines += [cells, *last]
    return lines


def wrapped(
    lines: Iterable[str], width: int | None, *, whole: str | None = None, hanging: int = _HANGING
) -> Iterator[str]:
    """Yield lines, wrapping those that are too long.

    Args:
        lines: the lines.
        width: maximum columns of a line; None for unlimited.
        whole: prefix of lines that must not be wrapped; None for none.
        hanging: further indentation of continued lines.
    """
    for line in lines:
        if width is None or (whole is not None and line.startswith(whole)):
            yield line
            continue
        indent = " " * (len(line) - len(line.lstrip()) + hanging)
        yield from textwrap.wrap(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )


def _width(rows: Sequence[Sequence[str]], columns: Sequence[int]) -> int:
    return sum(max(len(row[column]) for row in rows) for column in columns) + _GAP * (len(columns) - 1)


def _narrow(widths: list[int], *, by: int) -> None:
    """Make columns narrower: first the last, then always the widest of the others."""
    for is_last, least in ((True, _LEAST_LAST), (False, _LEAST), (True, _LEAST), (False, 1)):
        others = range(len(widths) - 1)
        while by > 0 and widths:
            column = len(widths) - 1 if is_last or not others else max(others, key=widths.__getitem__)
            if widths[column] <= least:
                break
            widths[column] -= 1
            by -= 1


def _wrapped_cell(cell: str, width: int) -> list[str]:
    return [cell] if len(cell) <= width else textwrap.wrap(cell, width, break_on_hyphens=False)
