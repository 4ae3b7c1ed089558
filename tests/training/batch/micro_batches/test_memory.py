"""Activations in memory are those of one micro-batch, and the logits of all samples are not kept."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from split_forward import SavedTensors
from split_models import split, tiny
from torch.utils._python_dispatch import TorchDispatchMode


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


def test_a_piece_runs_beside_the_logits_of_no_other_piece() -> None:
    """Those of the last one before may be the script's still, as without splitting."""
    model, batch = tiny("gpt2")
    made: list[Any] = []
    beside: list[int] = []
    model.transformer.register_forward_pre_hook(
        lambda *_: beside.append(sum(one() is not None for one in made))
    )
    model.lm_head.register_forward_hook(lambda layer, _, output: made.append(weakref.ref(output)))
    driver = split(model)
    for _ in range(4):
        outputs = model(**batch)
        driver.backward(outputs.loss)
    assert len(beside) > 4 * 3
    assert max(beside[-6:]) <= 1


@pytest.mark.parametrize("micro_batch_size", [6, 8])
def test_a_check_runs_no_more_samples_at_once_than_a_micro_batch(micro_batch_size: int) -> None:
    model, batch = tiny("gpt2")
    rows: list[int] = []
    model.lm_head.register_forward_hook(lambda layer, inputs, _: rows.append(len(inputs[0])))
    split(model, micro_batch_size)
    model(**{name: value.repeat(2, 1) for name, value in batch.items()})
    assert max(rows) == micro_batch_size


class _Widest(TorchDispatchMode):
    """The most elements of a tensor in a wider dtype than fp32."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype == torch.float64:
            self.num_elements = max(self.num_elements, made.numel())
        return made


def test_a_check_copies_no_logits_to_a_wider_dtype() -> None:
    model, batch = tiny("gpt2")
    split(model)
    widest = _Widest()
    with widest:
        logits = model(**batch).logits
    assert widest.num_elements < logits.numel() / 4
