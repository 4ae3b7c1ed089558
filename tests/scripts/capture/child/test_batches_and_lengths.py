"""Shapes and lengths of batches, and the lengths of a whole dataset."""

from __future__ import annotations

from typing import Any

import pytest

from zerofit.core.capture import CapturedBatch
from zerofit.scripts.capture.child.batches import (
    captured_batch,
    captured_lengths,
    first_batches,
    nested,
    num_samples,
)
from zerofit.scripts.capture.child.training_record import captured_loader


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


class _Loader:
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset


def _table(rows: list[dict[str, Any]]) -> Any:
    import datasets

    return datasets.Dataset.from_list(rows)


def _longest(
    dataset: Any, *, most: int | None = None, seen: tuple[int, ...] = (2, 9)
) -> tuple[int, int, bool]:
    batches = (CapturedBatch(tensors=(), lengths=seen),)
    lengths = captured_lengths(_Loader(dataset), batches, most=most)
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


def test_a_column_of_lengths_counts_first_where_it_holds_those_seen() -> None:
    rows = [{"input_ids": [1] * 5, "length": length} for length in (30, 40)]
    assert _longest(_table(rows), seen=(40,)) == (2, 40, True)
    assert _longest(_table(rows), seen=(30, 30)) == (2, 5, True)
    # Characters, or seconds of sound, are called a length too.
    assert _longest(_table(rows), seen=(5, 5)) == (2, 5, True)
    assert _longest(_table(rows).remove_columns("input_ids"), seen=(5, 7)) == (2, 7, False)


def test_fewer_batches_are_read_where_one_fails() -> None:
    def loader() -> Any:
        yield from (1, 2)
        raise OSError("the file\nis gone")

    notes: list[str] = []
    assert first_batches(loader(), 4, notes.append) == [1, 2]
    assert notes == ["only 2 of the first 4 batches could be read: OSError: the file is gone"]
    assert first_batches(iter((1, 2, 3)), 2, notes.append) == [1, 2]
    assert len(notes) == 1
    assert first_batches(map(int, ("word",)), 2, notes.append) == []
    with pytest.raises(ValueError, match="word"):
        first_batches(map(int, ("word",)), 2, notes.append, needs_one=True)


_COLLATORS = {
    "default_collate": False,
    "default_data_collator": False,
    "DataCollatorWithPadding": False,
    "DataCollatorForLanguageModeling": False,
    "masked": True,
    "DataCollatorForPermutationLanguageModeling": True,
    "a function of the script's": None,
    "a subclass of the script's": None,
    "behind Trainer's": True,
    "whole words of zerofit.data": True,
}


def _collators() -> dict[str, Any]:
    import torch
    import transformers
    from transformers.trainer_utils import RemoveColumnsCollator

    from zerofit.data import WholeWordCollator

    class Tokenizer:
        mask_token = "[MASK]"

    class Own(transformers.DataCollatorWithPadding):
        pass

    tokenizer: Any = Tokenizer()
    masked = transformers.DataCollatorForLanguageModeling(tokenizer)
    return {
        "default_collate": torch.utils.data.default_collate,
        "default_data_collator": transformers.default_data_collator,
        "DataCollatorWithPadding": transformers.DataCollatorWithPadding(tokenizer),
        "DataCollatorForLanguageModeling": transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
        "masked": masked,
        "DataCollatorForPermutationLanguageModeling": transformers.DataCollatorForPermutationLanguageModeling(
            tokenizer
        ),
        "a function of the script's": lambda rows: rows,
        "a subclass of the script's": Own(tokenizer),
        "behind Trainer's": RemoveColumnsCollator(masked, []),
        "whole words of zerofit.data": WholeWordCollator(tokenizer=tokenizer),
    }


def test_which_collators_draw_random_numbers() -> None:
    import torch

    found = {
        name: captured_loader(torch.utils.data.DataLoader([1], collate_fn=one)).draws_random
        for name, one in _collators().items()
    }
    assert found == _COLLATORS


def test_lengths_of_lists_and_subsets() -> None:
    import torch

    rows = [{"input_ids": [1] * n} for n in (4, 6, 5)]
    assert _longest(rows) == (3, 6, True)
    assert _longest(torch.utils.data.Subset(rows, [0, 2])) == (2, 5, True)


class _Told(list):
    lengths = [4, 9, 5]


def test_a_field_of_lengths_tells_those_of_samples_of_any_kind() -> None:
    import torch

    assert _longest(_Told("abc")) == (3, 9, True)
    assert _longest(torch.utils.data.ConcatDataset([_Told("abc"), _Told("abc")])) == (6, 9, True)


@pytest.mark.parametrize("dataset", [None, [b"no sample"], "text"])
def test_else_the_batches_tell(dataset: Any) -> None:
    assert _longest(dataset) == (2, 9, False)


def test_without_tokens_there_are_no_lengths() -> None:
    assert captured_lengths(_Loader([]), (CapturedBatch(tensors=()),), most=None) is None
