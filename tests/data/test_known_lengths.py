"""Lengths of samples: of tables, lists and a dataset's own field, and never by reading the samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.utils.data import ConcatDataset, Subset
from transformers import BatchEncoding

from zerofit.core.errors import UserError
from zerofit.data import sample_lengths

IDS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]


class Own:
    """A dataset whose samples must not be read."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        raise AssertionError(f"sample {index} was read")


class OwnWithLengths(Own):
    lengths = (3, 1, 2, 4)


class OwnWithWords(Own):
    lengths = ("a", "b", "c", "d")


class OwnWithTooFew(Own):
    lengths = (3, 1)


def table() -> Dataset:
    return Dataset.from_dict({"input_ids": IDS, "labels": [0, 1, 0, 1]})


def unreadable() -> Dataset:
    def read(_: Any) -> Any:
        raise AssertionError("samples were read")

    return table().with_transform(read)


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (table(), [3, 1, 2, 4]),
        (unreadable(), [3, 1, 2, 4]),
        (table().with_format("torch"), [3, 1, 2, 4]),
        (table().select([3, 0]), [4, 3]),
        (Dataset.from_dict({"text": ["a", "b"], "length": [7, 9]}), [7, 9]),
        ([{"input_ids": ids} for ids in IDS], [3, 1, 2, 4]),
        (Subset(table(), [3, 0]), [4, 3]),
        (ConcatDataset([table(), table().select([0])]), [3, 1, 2, 4, 3]),
        (OwnWithLengths(), [3, 1, 2, 4]),
        (OwnWithTooFew(), None),
        (Own(), None),
        (Subset(Own(), [1]), None),
        (ConcatDataset([table(), Own()]), None),
        (Dataset.from_dict({"text": ["a", "b"]}), None),
        ([1, 2, 3], None),
        ([BatchEncoding({"input_ids": ids}) for ids in IDS], [3, 1, 2, 4]),
        ([{"input_ids": torch.tensor(ids)} for ids in IDS], [3, 1, 2, 4]),
        ([{"input_ids": "a b"}], None),
        ([{"input_ids": None}], None),
        ([{"input_ids": [[1, 2], [3]]}], None),
        ([{"input_ids": torch.ones(2, 5)}], None),
        (Dataset.from_dict({"input_ids": ["a b", "c"]}), None),
        (Dataset.from_dict({"input_ids": [[[1, 2], [3]], [[4], [5]]]}), None),
        (Dataset.from_dict({"length": ["7", "9"]}), None),
        (Dataset.from_dict({"length": [7, None]}), None),
        (Dataset.from_dict({"length": [7.5, 9.0]}), None),
    ],
)
def test_lengths_are_told_without_reading_samples(dataset: Any, expected: list[int] | None) -> None:
    found = sample_lengths(dataset)
    assert (found if found is None else found.tolist()) == expected


def test_a_field_of_lengths_that_are_none_is_told() -> None:
    with pytest.raises(UserError) as caught:
        sample_lengths(OwnWithWords())
    assert caught.value.found == "('a', 'b', 'c', 'd')"
