"""The distribution of the samples' lengths: of the whole dataset where that is cheap."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zerofit.core.capture import CapturedLengths
from zerofit.data.known_lengths import list_lengths, sample_lengths
from zerofit.data.lengths import LengthHistogram
from zerofit.scripts.capture.child.batches import LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from zerofit.core.capture import CapturedBatch

_COLUMNS = ("attention_mask", "input_ids")
_ROWS_AT_ONCE = 10_000
"""ASSUMPTION: a mask of 10,000 rows takes some tens of MB."""


def captured_lengths(
    loader: Any, batches: Sequence[CapturedBatch], *, most: int | None
) -> CapturedLengths | None:
    """Return the distribution; None where samples have no tokens.

    Args:
        loader: the DataLoader of the training loop, or None.
        batches: those that were seen.
        most: where the script says that longer samples are cut; None elsewhere.
    """
    seen = [length for batch in batches for length in batch.lengths]
    if not seen:
        return None
    dataset = getattr(loader, "dataset", None)
    try:
        whole, is_whole = _of_dataset(dataset, seen)
    except Exception:
        whole, is_whole = [], False  # a column of another kind: the batches tell
    lengths = whole or seen
    if most is not None:
        lengths = [min(length, most) for length in lengths]
    return summary(lengths, is_whole=is_whole and bool(whole))


def summary(lengths: Iterable[int], *, is_whole: bool) -> CapturedLengths:
    """Return the distribution; a percentile is the least length that so many do not exceed."""
    histogram = LengthHistogram.of_lengths(int(length) for length in lengths)
    return CapturedLengths(
        num_samples=histogram.num_samples,
        is_whole=is_whole,
        p50=histogram.percentile(50),
        p90=histogram.percentile(90),
        p99=histogram.percentile(99),
        longest=histogram.longest,
        counts=histogram.counts,
    )


def _of_dataset(dataset: Any, seen: Sequence[int]) -> tuple[list[int], bool]:
    """Return the lengths of a dataset's samples, and whether they are all; none where it is no table.

    A column that is called "length" may count something else: it must hold the lengths that were seen.
    """
    import torch

    if isinstance(dataset, torch.utils.data.Subset):
        lengths, is_whole = _of_dataset(dataset.dataset, seen)
        return [lengths[index] for index in dataset.indices if index < len(lengths)], is_whole
    names = getattr(dataset, "column_names", None)
    if isinstance(dataset, list) and dataset and isinstance(dataset[0], Mapping):
        return _of_list(dataset)
    if not isinstance(names, list) or not hasattr(dataset, "with_format"):
        known = sample_lengths(dataset)
        return ([], False) if known is None else (known.tolist(), True)
    if "length" in names:
        lengths = list(dataset.with_format(None)["length"])
        if Counter(seen) <= Counter(lengths):
            return lengths, True
    name = next((name for name in _COLUMNS if name in names), None)
    return _of_column(dataset, name) if name is not None else ([], False)


def _of_column(dataset: Any, name: str) -> tuple[list[int], bool]:
    """Return the lengths of a column's lists in an Arrow table, without making Python objects of them."""
    started, lengths = time.monotonic(), []
    rows = dataset.with_format("arrow", columns=[name])
    for start in range(0, len(dataset), _ROWS_AT_ONCE):
        part = rows[start : start + _ROWS_AT_ONCE].column(name)
        for chunk in part.chunks:
            lengths += list_lengths(chunk, is_mask=name != "input_ids")
        if time.monotonic() - started > LIMIT_S:
            break
    return lengths, len(lengths) == len(dataset)


def _of_list(dataset: list[Any]) -> tuple[list[int], bool]:
    """Return the lengths of a plain list of samples, each a dict with input_ids."""
    started, lengths = time.monotonic(), []
    for sample in dataset:
        mask = sample.get("attention_mask")
        lengths.append(len(sample["input_ids"]) if mask is None else int(sum(int(one) for one in mask)))
        if time.monotonic() - started > LIMIT_S:
            break
    return lengths, len(lengths) == len(dataset)
