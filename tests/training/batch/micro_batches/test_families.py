"""Gradients of split forward passes are those of whole ones, for each family of models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusals import refusal
from split_models import assert_equal, gradients, split, tiny

_FAMILIES = [
    "gpt2",
    "llama",
    "masked lm",
    "classification",
    "regression",
    "several labels",
    "token classification",
    "question answering",
    "t5",
    "vit",
    "lora",
    "frozen",
]


@pytest.mark.parametrize(
    "micro_batch_size", [2, 3, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4))]
)
@pytest.mark.parametrize("name", _FAMILIES)
def test_the_models_own_loss(name: str, micro_batch_size: int) -> None:
    model, batch = tiny(name)
    whole = model(**batch)
    whole.loss.backward()
    expected = gradients(model)
    made = split(model, micro_batch_size)
    for _ in range(4):  # the first two ask for a gradient, the others guess it
        outputs = model(**batch)
        assert outputs.loss.item() == pytest.approx(whole.loss.item(), rel=1e-5)
        made.backward(outputs.loss)
        assert_equal(gradients(model), expected)


@pytest.mark.parametrize("name", ["gpt2", "t5", "vit", "token classification"])
def test_a_loss_outside_of_the_model(name: str) -> None:
    def loss_of(outputs: Any) -> torch.Tensor:
        logits, labels = outputs.logits, batch["labels"]
        own = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
        return own * 0.3 + logits.pow(2).mean() + outputs.loss * 0.5

    model, batch = tiny(name)
    loss_of(model(**batch)).backward()
    expected = gradients(model)
    made = split(model)
    for _ in range(3):
        made.backward(loss_of(model(**batch)))
        assert_equal(gradients(model), expected)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("clip", "output logits_per_image has shape"),
        ("mixtral", "output aux_loss is "),
        ("pretraining", "output loss is "),
    ],
)
def test_a_loss_over_all_samples_together_is_refused(name: str, found: str) -> None:
    model, batch = tiny(name)
    split(model)
    error = refusal(model, **batch)
    assert error.rule == "forward-not-separable"
    assert found in error.found
