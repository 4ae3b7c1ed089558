"""Readers of datasets in Arrow's formats: parquet, and the arrow files of datasets' save_to_disk."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerofit.data.reading import BATCH_BYTES, BATCH_ROWS, HEAD_ROWS, Batch, broken, without_column

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_BUFFER_BYTES = 2**20
"""Read at once of each parquet column. ASSUMPTION: disks are as fast with it as with whole row groups."""
_MAGIC = b"ARROW1"
"""How Arrow's file format begins; its stream format does not.
https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format"""
_AT_ONCE = 10
"""Times BATCH_ROWS that are decoded at once, which is faster than fewer. ASSUMPTION."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetFile:
    """A dataset's parquet file; its row groups are read in small pieces."""

    path: Path

    @property
    def size_bytes(self) -> int:
        """On disk."""
        return self.path.stat().st_size

    def head(self) -> dict[str, list[Any]]:
        """Return the first rows' values by column."""
        with _readable(self.path), self._opened() as file:
            for batch in file.iter_batches(batch_size=HEAD_ROWS, use_threads=False):
                return _values(batch)
        return {}

    def batches(self, columns: Sequence[str]) -> Iterator[Batch]:
        """Yield all rows."""
        with _readable(self.path), self._opened() as file:
            if not set(columns) <= set(file.schema_arrow.names):
                raise without_column(self.path, columns, file.schema_arrow.names)
            done, total = 0, max(1, file.metadata.num_rows)
            for batch in self._pieces(file, columns):
                done += batch.num_rows
                yield Batch(
                    columns=tuple(batch.column(name) for name in columns),
                    bytes_read=self.size_bytes * done // total,
                )

    @staticmethod
    def _pieces(file: Any, columns: Sequence[str]) -> Iterator[Any]:
        """Yield all rows, so many at once as take BATCH_BYTES in the mean of their row group."""
        for number in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(number)
            held = (group.column(place) for place in range(group.num_columns))
            num_bytes = sum(
                one.total_uncompressed_size for one in held if one.path_in_schema.split(".")[0] in columns
            )
            yield from file.iter_batches(
                batch_size=_rows_at_once(num_bytes, group.num_rows),
                row_groups=[number],
                columns=list(columns),
                use_threads=False,
            )

    def _opened(self) -> Any:
        import pyarrow.parquet  # type: ignore[import-untyped]

        return pyarrow.parquet.ParquetFile(self.path, buffer_size=_BUFFER_BYTES, pre_buffer=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrowFile:
    """A file as datasets writes them: Arrow's stream format, or its file format."""

    path: Path

    @property
    def size_bytes(self) -> int:
        """On disk."""
        return self.path.stat().st_size

    def head(self) -> dict[str, list[Any]]:
        """Return the first rows' values by column."""
        with _readable(self.path), self._opened() as (batches, _):
            for batch in batches:
                if batch.num_rows:
                    return _values(batch.slice(0, HEAD_ROWS))
        return {}

    def batches(self, columns: Sequence[str]) -> Iterator[Batch]:
        """Yield all rows."""
        with _readable(self.path), self._opened() as (batches, file):
            for batch in batches:
                if not set(columns) <= set(batch.schema.names):
                    raise without_column(self.path, columns, batch.schema.names)
                yield Batch(columns=tuple(batch.column(name) for name in columns), bytes_read=file.tell())

    @contextmanager
    def _opened(self) -> Iterator[tuple[Iterator[Any], Any]]:
        """Read with plain reads: pages of a mapped file would count as this process's memory."""
        import pyarrow.ipc  # type: ignore[import-untyped]

        with pyarrow.OSFile(str(self.path)) as file:
            is_file_format = file.read(len(_MAGIC)) == _MAGIC
            file.seek(0)
            if is_file_format:
                reader = pyarrow.ipc.open_file(file)
                yield (reader.get_batch(number) for number in range(reader.num_record_batches)), file
            else:
                yield iter(pyarrow.ipc.open_stream(file)), file


def as_lists(columns: Sequence[Any]) -> Iterator[list[list[Any]]]:
    """Yield columns as Python's values, so many rows at once as take BATCH_BYTES in the mean.

    Args:
        columns: lists, or arrays of pyarrow, all of one length.
    """
    size = len(columns[0])
    num_bytes = sum(0 if isinstance(column, list) else column.nbytes for column in columns)
    step = _rows_at_once(num_bytes, size)
    for start in range(0, size, step):
        parts = (column[start : start + step] for column in columns)
        yield [part if isinstance(part, list) else part.to_pylist() for part in parts]


def _rows_at_once(num_bytes: int, num_rows: int) -> int:
    return max(1, min(_AT_ONCE * BATCH_ROWS, BATCH_BYTES * num_rows // max(1, num_bytes)))


def list_lengths(column: Any, *, is_mask: bool = False) -> list[int]:
    """Return the length of each list of an Arrow array, without making Python objects of what is in them.

    Args:
        column: an array of lists; null counts as empty.
        is_mask: whether only what is not 0 counts.
    """
    import numpy
    import pyarrow.compute  # type: ignore[import-untyped]

    widths = numpy.asarray(pyarrow.compute.fill_null(pyarrow.compute.list_value_length(column), 0))
    if is_mask and len(widths):
        values = numpy.asarray(column.flatten()) != 0
        ends = numpy.cumsum(widths)
        total = numpy.concatenate(([0], numpy.cumsum(values)))
        widths = total[ends] - total[ends - widths]
    lengths: list[int] = widths.tolist()
    return lengths


def holds_lists(column: Any, *, of_ids: bool = False) -> bool:
    """Return whether an Arrow array holds lists, or, of_ids, lists of whole numbers or of nothing."""
    from pyarrow import types

    kind = column.type
    if not any(is_it(kind) for is_it in (types.is_list, types.is_large_list, types.is_fixed_size_list)):
        return False
    return not of_ids or types.is_integer(kind.value_type) or types.is_null(kind.value_type)


def _values(batch: Any) -> dict[str, list[Any]]:
    return {name: batch.column(name).to_pylist() for name in batch.schema.names}


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what Arrow says of a file that it can't read into an error of the user's."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.strerror:
            why, fix = "the system refuses it", "name another file"
        else:
            why, fix = "it is damaged, cut off, or of another kind than its name says", "store it anew"
        first = str(error).strip().splitlines()[0].rstrip(".")
        raise broken(path, getattr(error, "strerror", None) or first, why=why, fix=fix) from None
