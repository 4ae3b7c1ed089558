"""Dropout: the second run of a micro-batch drops what the first dropped, and later draws are as they were."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from split_models import assert_equal, gradients, split, tiny

from zerofit.training.batch.micro_batches.random_state import devices_of


@pytest.mark.parametrize("name", ["gpt2", "t5", "lora"])
def test_gradients_are_those_of_the_dropout_that_the_script_saw(name: str) -> None:
    model, batch = tiny(name, dropout=True)
    shift = name != "t5"
    counts = [int((batch["labels"][row : row + 2, shift:] != -100).sum()) for row in (0, 2, 4)]
    torch.manual_seed(7)
    seen, expected = [], []
    for _ in range(4):  # the same micro-batches, one by one, in an ordinary loop
        losses = []
        for row, count in zip((0, 2, 4), counts, strict=True):
            piece = {key: value[row : row + 2] for key, value in batch.items()}
            loss = model(**piece).loss * (count / sum(counts))
            loss.backward()
            losses.append(loss.item())
        seen.append(sum(losses))
        expected.append(gradients(model))
    last_draw = torch.rand(3)
    made = split(model)
    torch.manual_seed(7)
    for loss_seen, one in zip(seen, expected, strict=True):
        outputs = model(**batch)
        made.backward(outputs.loss)
        assert outputs.loss.item() == pytest.approx(loss_seen, rel=1e-6)
        assert_equal(gradients(model), one)
    assert torch.equal(torch.rand(3), last_draw)


def test_every_generator_is_put_back() -> None:
    class Random(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))
            self.draws: list[tuple[float, float, float]] = []

        def forward(self, x: Any) -> Any:
            if self.training:
                self.draws.append((random.random(), np.random.rand(), float(torch.rand(()))))
            return x * self.weight

    model = Random()
    made = split(model)
    made.backward(model(torch.randn(4, 3)).sum())
    first, second, *again = model.draws
    assert again == [first, second]
    now = random.random(), np.random.rand(), float(torch.rand(()))
    assert now not in (first, second)


def test_looking_at_logits_and_checking_draw_nothing() -> None:
    model, batch = tiny("gpt2", dropout=True)
    made = split(model)
    made.backward(model(**batch).loss)
    torch.manual_seed(1)
    outputs = model(**batch)
    expected = torch.rand(3)
    torch.manual_seed(1)
    outputs = model(**batch)
    loss, logits = outputs.loss, outputs.logits
    made.backward(loss)
    assert torch.equal(torch.rand(3), expected)
    shifted = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:])
    assert loss.item() == pytest.approx(shifted.item(), rel=1e-5)


def test_autocast_of_the_script_reaches_the_second_run() -> None:
    model, batch = tiny("vit")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (model(**batch).loss * 1.0).backward()
    expected = gradients(model)
    made = split(model)
    for _ in range(4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch).loss
        made.backward(loss)
        assert_equal(gradients(model), expected, within=0.03)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made.backward(model(**batch).loss)
        assert_equal(gradients(model), expected, within=0.03)


@pytest.mark.parametrize(
    ("is_available", "is_initialized", "devices"),
    [
        (True, True, {"cpu", "cuda:1"}),
        (True, False, {"cpu"}),  # nothing has run on it yet
        (False, True, {"cpu"}),
    ],
)
def test_an_offloaded_model_computes_on_the_ranks_accelerator_too(
    is_available: bool, is_initialized: bool, devices: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: is_available)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    module = SimpleNamespace(is_initialized=lambda: is_initialized)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert {str(device) for device in devices_of(torch.nn.Linear(1, 1))} == devices
