"""Values that follow from a batch are read on fake tensors; others are not."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from zerofit.models.trace.known_values import _MOST_ELEMENTS, reading_values


def test_what_follows_from_constants_is_read() -> None:
    with FakeTensorMode(), reading_values():
        mask = torch.ones(2, 8, dtype=torch.int64)
        mask[:, -1] = 0
        places = (mask == 0).nonzero()
        assert places.tolist() == [[0, 7], [1, 7]]
        assert mask.repeat_interleave(torch.tensor([1, 2]), dim=0).shape == (3, 8)
        assert [rates.tolist() for rates in torch.linspace(0, 1, 3).split([1, 2])] == [[0.0], [0.5, 1.0]]


def test_what_follows_from_a_tensors_form_is_read() -> None:
    with FakeTensorMode(), reading_values():
        unknown = torch.empty(2, 4)
        mask = torch.zeros_like(unknown, dtype=torch.int64)
        mask[:, 0] = 1
        assert mask.sum(dim=1).max().item() == 1
        assert unknown.new_full((3,), 5).tolist() == [5, 5, 5]
        with pytest.raises(DataDependentOutputException):
            torch.empty_like(mask)[0, 0].item()


def test_what_unknown_values_overwrite_is_unknown() -> None:
    with FakeTensorMode(), reading_values():
        numbers = torch.zeros(4)
        first = numbers[0]
        assert first.item() == 0
        numbers.copy_(torch.empty(4))
        with pytest.raises(DataDependentOutputException):
            first.item()


def test_a_router_chooses_each_expert_as_often() -> None:
    with FakeTensorMode(), reading_values():
        scores = torch.empty(2, 6, 4)
        assert scores.argmax(dim=-1).flatten().bincount(minlength=4).tolist() == [3, 3, 3, 3]
        assert scores.topk(2, dim=-1).indices.flatten().bincount(minlength=4).tolist() == [6, 6, 6, 6]


def test_one_row_of_a_large_mask_is_read() -> None:
    size = 2048
    assert size**2 > _MOST_ELEMENTS
    with FakeTensorMode(), reading_values():
        kept = torch.ones(2, size, dtype=torch.bool)
        kept[:, -3:] = False
        rows = torch.arange(size)[None, None, :, None] >= 0
        mask = torch.where(rows & kept[:, None, None, :], 0.0, -1.0).expand(2, 1, size, size)
        assert (mask[:, 0, 0, :] < 0).sum(dim=-1).tolist() == [3, 3]
