"""Rows of cells as lines of text, in aligned columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines, the columns aligned and the last one as long as it is."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return [
        "  ".join((*(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)), row[-1])).rstrip()
        for row in rows
    ]
