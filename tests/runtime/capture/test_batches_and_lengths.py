"""Shapes and lengths of batches, and the lengths of a whole dataset."""

from __future__ import annotations

from typing import Any

import pytest

from zerofit.capture import CapturedBatch, CapturedLengths
from zerofit.runtime.capture.batches import captured_batch, nested, num_samples
from zerofit.runtime.capture.lengths import captured_lengths, summary


def _batch(**named: Any) -> dict[str, Any]:
    import torch

    return {name: torch.tensor(value) for name, value in named.items()}


_IDS = [[5, 6, 7, 0], [5, 0, 0, 0]]
_LENGTHS = [
    ("the mask counts", {"input_ids": _IDS, "attention_mask": [[1, 1, 1, 1], [1, 1, 0, 0]]}, 0, (4, 2)),
    ("else the padding token", {"input_ids": _IDS}, 0, (3, 1)),
    ("padding on the left", {"input_ids": [[0, 0, 5, 6]]}, 0, (2,)),
    ("an end token inside is no padding", {"input_ids": [[5, 2, 5, 2, 2]]}, 2, (3,)),
    ("without a padding token all count", {"input_ids": _IDS}, None, (4, 4)),
    ("the longest of several choices", {"input_ids": [[[5, 0], [5, 6]]]}, 0, (2,)),
    ("no tokens, no lengths", {"pixel_values": [[1.0, 2.0]]}, 0, ()),
]


@pytest.mark.parametrize(("_why", "batch", "padding", "expected"), _LENGTHS)
def test_tokens_of_each_sample(
    _why: str, batch: dict[str, Any], padding: int | None, expected: tuple[int, ...]
) -> None:
    assert captured_batch(_batch(**batch), padding=padding).lengths == expected


def test_names_of_tensors_are_joined_by_dots() -> None:
    import torch

    one = torch.zeros(2, 3)
    batch = nested((one, [one, {"inner": one}]), {"labels": one})
    named = [(tensor.name, tensor.shape) for tensor in captured_batch(batch, padding=None).tensors]
    assert named == [("0", (2, 3)), ("1.0", (2, 3)), ("1.1.inner", (2, 3)), ("labels", (2, 3))]
    assert [tensor.name for tensor in captured_batch(nested((one,), {}), padding=None).tensors] == [""]


def test_samples_are_the_size_that_all_tensors_share() -> None:
    assert num_samples(_batch(a=[[1], [2]], b=[1, 2], number=3)) == 2
    assert num_samples(_batch(a=[[1], [2]], b=[1, 2, 3])) is None


def test_a_percentile_is_the_length_that_so_many_do_not_exceed() -> None:
    expected = CapturedLengths(num_samples=100, is_whole=True, p50=50, p90=90, p99=99, longest=100)
    assert summary(range(100, 0, -1), is_whole=True) == expected
    assert summary([7], is_whole=False).p50 == 7


class _Loader:
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset


_SEEN = (CapturedBatch(tensors=(), lengths=(2, 9)),)


def _table(rows: list[dict[str, Any]]) -> Any:
    import datasets

    return datasets.Dataset.from_list(rows)


def _longest(dataset: Any, *, most: int | None = None) -> tuple[int, int, bool]:
    lengths = captured_lengths(_Loader(dataset), _SEEN, most=most)
    assert lengths is not None
    return lengths.num_samples, lengths.longest, lengths.is_whole


def test_lengths_of_a_whole_table() -> None:
    rows = [{"input_ids": [1] * (1 + index % 7)} for index in range(50)]
    assert _longest(_table(rows)) == (50, 7, True)
    assert _longest(_table(rows).select([0, 1, 2])) == (3, 3, True)
    assert _longest(_table(rows).with_format("torch")) == (50, 7, True)
    assert _longest(_table(rows), most=5) == (50, 5, True)


def test_a_mask_counts_where_samples_are_filled_up() -> None:
    rows = [{"input_ids": [1] * 8, "attention_mask": [1] * n + [0] * (8 - n)} for n in (3, 5, 2, 4)]
    assert _longest(_table(rows)) == (4, 5, True)
    assert _longest(_table(rows).select([2, 0])) == (2, 3, True)


def test_a_column_of_lengths_counts_first() -> None:
    assert _longest(_table([{"input_ids": [1], "length": 30}])) == (1, 30, True)


def test_lengths_of_lists_and_subsets() -> None:
    import torch

    rows = [{"input_ids": [1] * n} for n in (4, 6, 5)]
    assert _longest(rows) == (3, 6, True)
    assert _longest(torch.utils.data.Subset(rows, [0, 2])) == (2, 5, True)


@pytest.mark.parametrize("dataset", [None, [object()], "text"])
def test_else_the_batches_tell(dataset: Any) -> None:
    assert _longest(dataset) == (2, 9, False)


def test_without_tokens_there_are_no_lengths() -> None:
    assert captured_lengths(_Loader([]), (CapturedBatch(tensors=()),), most=None) is None
