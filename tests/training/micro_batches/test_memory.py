"""Activations in memory are those of one micro-batch, and the logits of all samples are not kept."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from split_forward import SavedTensors
from split_models import split, tiny


@pytest.mark.parametrize("num_steps", [1, 4])
def test_saved_activations_are_those_of_one_micro_batch(num_steps: int) -> None:
    def peak_bytes(size: int, micro_batch_size: int | None) -> int:
        model, batch = tiny("gpt2")
        batch = {key: value.repeat(4, 1)[:size] for key, value in batch.items()}
        backward = torch.Tensor.backward
        if micro_batch_size is not None:
            backward = split(model, micro_batch_size).backward
        for _ in range(num_steps - 1):
            backward(model(**batch).loss)
        saved = SavedTensors()
        with saved.counted():
            backward(model(**batch).loss)
        return saved.peak_bytes

    whole, one_piece, in_pieces = peak_bytes(16, None), peak_bytes(2, None), peak_bytes(16, 2)
    assert in_pieces == pytest.approx(one_piece, rel=0.05)
    assert whole > 3 * in_pieces


def test_logits_that_nobody_looks_at_are_not_kept() -> None:
    model, batch = tiny("gpt2")
    made: list[Any] = []
    model.lm_head.register_forward_hook(lambda layer, _, output: made.append(weakref.ref(output)))
    driver = split(model)
    for _ in range(4):
        made.clear()
        outputs = model(**batch)
        # The last micro-batch may wait with its graph.
        assert sum(one() is not None for one in made) <= 1
        driver.backward(outputs.loss)
