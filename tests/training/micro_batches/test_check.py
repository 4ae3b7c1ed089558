"""The check on a few samples: it leaves the model as it was, and says whose failure it met."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from split_models import assert_equal, gradients, split

from zerofit.core.errors import UserError


class _Merging(torch.nn.Module):
    """As loralib's layers: evaluation mode merges the adapter into the weight, training mode takes it out."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(3, 2, bias=False).requires_grad_(False)
        self.adapter = torch.nn.Parameter(torch.ones(2, 3))
        self.is_merged = False

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        if mode == self.is_merged:
            self.base.weight.data += self.adapter.data * (-1 if mode else 1)
            self.is_merged = not mode
        return self

    def forward(self, x: Any) -> Any:
        return self.base(x) if self.is_merged else self.base(x) + x @ self.adapter.T


def test_a_model_whose_evaluation_mode_does_more_stays_as_it_was() -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(_Merging(), torch.nn.Dropout(0.0)), torch.randn(6, 3)
    model[1].eval()  # frozen by the script
    weight = model[0].base.weight.clone()
    model(x).pow(2).sum().backward()
    expected = gradients(model)
    made = split(model)
    made.backward(model(x).pow(2).sum())
    assert_equal(gradients(model), expected)
    assert torch.equal(model[0].base.weight, weight)
    assert [one.training for one in model] == [True, False]


class _Weighted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 6)

    def forward(self, x: Any, labels: Any, weight: Any) -> Any:
        return {"loss": torch.nn.functional.cross_entropy(self.linear(x), labels, weight=weight)}


def test_a_model_that_fails_on_a_part_of_the_samples_is_refused_with_its_own_words() -> None:
    model = _Weighted()
    split(model)
    with pytest.raises(UserError) as error:
        model(torch.randn(6, 3), torch.arange(6), weight=torch.ones(6))  # six classes, six samples
    assert error.value.rule == "forward-not-separable"
    assert error.value.why == "the model fails on a part of the batch's samples"
    assert error.value.found.startswith("RuntimeError: weight tensor should be defined")
    assert isinstance(error.value.__cause__, RuntimeError)
