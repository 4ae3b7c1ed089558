"""Token counts of a dataset's samples without reading the samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any

import numpy

from zerofit.data.bucketing import as_lengths
from zerofit.data.columns import IDS, MASK

if TYPE_CHECKING:
    from zerofit.data.bucketing import Lengths

_LENGTH_COLUMN = "length"
"""The column in which tokenizers and Trainer store lengths (transformers/training_args.py,
length_column_name)."""
_ROWS_AT_ONCE = 100_000
"""ASSUMPTION: this many rows of ids take some hundred MB at most."""


def sample_lengths(dataset: Any, *, by_mask: bool = False) -> Lengths | None:
    """Return the number of tokens of each sample; None if that would need reading them.

    Supported are tables of `datasets` with a column input_ids or length, lists of dicts or encodings,
    datasets with an attribute `lengths`, and subsets and concatenations of these. Columns with other content
    are ignored: text under input_ids, lists of choices, lengths that are not integers.

    Args:
        dataset: a map-style dataset.
        by_mask: exclude tokens whose attention_mask is 0, the padding.

    Raises:
        UserError: its attribute `lengths` contains other values than token counts.
    """
    import torch

    data = torch.utils.data
    if isinstance(dataset, data.Subset):
        whole = sample_lengths(dataset.dataset, by_mask=by_mask)
        return None if whole is None else whole[numpy.asarray(dataset.indices)]
    if isinstance(dataset, data.ConcatDataset):
        parts = [sample_lengths(part, by_mask=by_mask) for part in dataset.datasets]
        known = [part for part in parts if part is not None]
        return numpy.concatenate(known) if len(known) == len(parts) else None
    found: Any
    names = getattr(dataset, "column_names", None)
    if isinstance(names, list) and hasattr(dataset, "with_format"):
        found = _of_table(dataset, names, by_mask=by_mask)
    else:
        found = _of_rows(dataset, by_mask=by_mask) if isinstance(dataset, list) else None
        if found is None:
            found = getattr(dataset, "lengths", None)
    is_one_each = hasattr(found, "__len__") and 0 < len(found) == len(dataset)
    return as_lengths(found) if is_one_each else None


def _of_rows(rows: list[Any], *, by_mask: bool) -> list[int] | None:
    """Return the lengths of rows, dicts or tokenizer outputs; None if they are not tokens."""
    ids: list[Any] = [row.get(IDS) if isinstance(row, Mapping) else None for row in rows]
    if not all(map(_are_tokens, ids)):
        return None
    masks = [row.get(MASK) if by_mask else None for row in rows]
    return [len(row) if mask is None else int(sum(mask)) for row, mask in zip(ids, masks, strict=True)]


def _are_tokens(ids: Any) -> bool:
    """Return True for one list of tokens; False for text, or lists of tokens of multiple choices."""
    if hasattr(ids, "ndim"):
        return bool(ids.ndim == 1)
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
        return False
    return not (ids and isinstance(ids[0], Sized))


def _of_table(dataset: Any, names: list[str], *, by_mask: bool) -> Any:
    """Return the lengths of a table of `datasets` without creating Python objects for its lists."""
    from pyarrow import types  # type: ignore[import-untyped]

    if IDS not in names:
        if _LENGTH_COLUMN not in names:
            return None
        column = dataset.with_format("arrow", columns=[_LENGTH_COLUMN])[:].column(_LENGTH_COLUMN)
        return numpy.asarray(column) if types.is_integer(column.type) and not column.null_count else None
    counts_mask = by_mask and MASK in names
    name = MASK if counts_mask else IDS
    rows = dataset.with_format("arrow", columns=[name])
    parts = []
    for start in range(0, len(dataset), _ROWS_AT_ONCE):
        column = rows[start : start + _ROWS_AT_ONCE].column(name)
        if not holds_ids(column.type):
            return None
        parts += [
            as_lengths(list_lengths(chunk, is_mask=counts_mask)) for chunk in column.chunks if len(chunk)
        ]
    return numpy.concatenate(parts) if parts else None


def holds_ids(kind: Any) -> bool:
    """Return True if a pyarrow type is a list of integers, or a list without any value."""
    from pyarrow import types

    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        return False
    return bool(types.is_integer(kind.value_type) or types.is_null(kind.value_type))


def list_lengths(column: Any, *, is_mask: bool = False) -> list[int]:
    """Return the length of each list of an Arrow array, 0 for null; for masks, the nonzero elements."""
    import pyarrow.compute  # type: ignore[import-untyped]

    widths = numpy.asarray(pyarrow.compute.fill_null(pyarrow.compute.list_value_length(column), 0))
    if is_mask and len(widths):
        values = numpy.asarray(column.flatten()) != 0
        ends = numpy.cumsum(widths)
        total = numpy.concatenate(([0], numpy.cumsum(values)))
        widths = total[ends] - total[ends - widths]
    lengths: list[int] = widths.tolist()
    return lengths
