"""How many tokens each sample of a dataset has, told without reading the samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy

from zerofit.data.bucketing import as_lengths
from zerofit.data.reading_arrow import list_lengths

if TYPE_CHECKING:
    from zerofit.data.bucketing import Lengths

_TOKENS = "input_ids"
_COUNTED = "length"
"""The column in which tokenizers and Trainer keep lengths (transformers/training_args.py,
length_column_name)."""
_ROWS_AT_ONCE = 100_000
"""ASSUMPTION: so many rows of ids take some hundred MB at most."""


def sample_lengths(dataset: Any) -> Lengths | None:
    """Return the tokens of each sample; None where that takes reading them.

    Known are tables of `datasets` with a column input_ids or length, lists of dicts, datasets with a field
    `lengths`, and subsets and chains of these.

    Args:
        dataset: a dataset with indices.
    """
    import torch

    data = torch.utils.data
    if isinstance(dataset, data.Subset):
        whole = sample_lengths(dataset.dataset)
        return None if whole is None else whole[numpy.asarray(dataset.indices)]
    if isinstance(dataset, data.ConcatDataset):
        parts = [sample_lengths(part) for part in dataset.datasets]
        known = [part for part in parts if part is not None]
        return numpy.concatenate(known) if len(known) == len(parts) else None
    found: Any
    names = getattr(dataset, "column_names", None)
    if isinstance(names, list) and hasattr(dataset, "with_format"):
        found = _of_table(dataset, names)
    elif isinstance(dataset, list) and all(isinstance(one, dict) and _TOKENS in one for one in dataset):
        found = [len(one[_TOKENS]) for one in dataset]
    else:
        found = getattr(dataset, "lengths", None)
    return as_lengths(found) if _is_one_each(found, dataset) else None


def _is_one_each(lengths: Any, dataset: Any) -> bool:
    return hasattr(lengths, "__len__") and 0 < len(lengths) == len(dataset)


def _of_table(dataset: Any, names: list[str]) -> Any:
    """Return the lengths of a table of `datasets`, without making Python objects of its lists."""
    if _TOKENS not in names:
        return numpy.asarray(dataset.with_format(None)[_COUNTED][:]) if _COUNTED in names else None
    rows = dataset.with_format("arrow", columns=[_TOKENS])
    parts = [
        as_lengths(list_lengths(chunk))
        for start in range(0, len(dataset), _ROWS_AT_ONCE)
        for chunk in rows[start : start + _ROWS_AT_ONCE].column(_TOKENS).chunks
        if len(chunk)
    ]
    return numpy.concatenate(parts) if parts else None
