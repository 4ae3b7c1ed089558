"""What every reader of a dataset's files gives: batches of the wanted columns, one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from zerofit.core.errors import UserError
from zerofit.core.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

HEAD_ROWS = 100
"""Rows that are looked at to tell what columns hold. ASSUMPTION: enough to meet each kind of value."""
BATCH_ROWS = 1000
"""Rows that are handed on at once. ASSUMPTION: few enough to be small, enough to be fast."""
BATCH_BYTES = 8 * 2**20
"""Of rows that are handed on at once, where so many take more; of the file, unpacked. ASSUMPTION: as
values of Python they take several times as much, and that is held once or twice."""
MAX_ROW_BYTES = 64 * 2**20
"""ASSUMPTION: a longer line is a file without line ends, and holding it whole takes several times as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Some rows, one after the other as they stand in the file."""

    columns: tuple[Sequence[Any], ...]
    """One for each column that was asked for: lists, or arrays of pyarrow."""
    bytes_read: int
    """Of the file on disk, once these rows are done."""


class DataFile(Protocol):
    """One file of a dataset."""

    @property
    def path(self) -> Path:
        """Where it is."""

    @property
    def size_bytes(self) -> int:
        """On disk."""

    def head(self) -> dict[str, list[Any]]:
        """Return the first rows' values by column; no column where the file holds no row.

        Raises:
            UserError: the file can't be read.
        """

    def batches(self, columns: Sequence[str]) -> Iterator[Batch]:
        """Yield all rows; None stands where a row lacks a column.

        Raises:
            UserError: the file can't be read.
        """


def broken(path: Path, found: str, *, why: str, fix: str) -> UserError:
    """Return what is said of a file that can't be read to its end."""
    return UserError(
        "data-file-broken", "a file of the dataset can't be read", found=f"{path}: {found}", why=why, fix=fix
    )


def without_column(path: Path, columns: Sequence[str], names: Sequence[str]) -> UserError:
    """Return what is said where a later file lacks a column that the first one has.

    Args:
        path: the file.
        columns: those that are read.
        names: those that it has.
    """
    missing = [name for name in columns if name not in names]
    return broken(
        path,
        f"no column {', '.join(missing)}",
        why=f"its columns are {', '.join(names)}, and the files of a dataset have the same",
        fix="leave the file out, or give all files the same columns",
    )


def row_too_long(path: Path, line: int) -> UserError:
    """Return what is said of a row that is too long to be held."""
    return broken(
        path,
        f"line {line} has more than {format_bytes(MAX_ROW_BYTES)}",
        why="one row is held whole, and a line of that length is most often a file without line ends",
        fix="put each sample on a line of its own, or store the dataset as parquet",
    )
