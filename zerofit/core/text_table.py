"""Tables as lines of text with aligned columns."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


_GAP = 2
_CUT = "…"
_HANGING = 4
_LEAST_LAST = 12
"""Minimum width of the last cell."""
_LEAST_FOLDED = 40
"""Minimum width of a wrapped last cell beside the others; if less is left, it goes below them."""


def table_lines(
    rows: Sequence[Sequence[str]], *, width: int | None = None, leaves_out: Sequence[int] = ()
) -> list[str]:
    """Return rows of cells as lines with aligned columns.

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
        # The last cell is truncated first, then always the widest of the others.
        over = max(0, sum(widths) + _GAP * (len(widths) - 1) - width)
        cut = min(over, max(0, widths[-1] - _LEAST_LAST))
        widths[-1] -= cut
        for _ in range(over - cut):
            widest = max(widths[:-1], default=0)
            widths[widths.index(widest)] = max(1, widest - 1)
    return [
        (" " * _GAP)
        .join(f"{_cut(row[column], size):<{size}}" for column, size in zip(kept, widths, strict=True))
        .rstrip()
        for row in rows
    ]


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


def _cut(cell: str, width: int) -> str:
    return cell if len(cell) <= width else cell[: max(0, width - 1)] + _CUT
