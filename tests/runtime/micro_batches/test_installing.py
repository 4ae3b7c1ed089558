"""The hook on Accelerator.prepare(), and what the model that it returns still can do."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from zerofit.runtime.changes import Changes
from zerofit.runtime.micro_batches import install

Tiny = Callable[..., Any]


@pytest.fixture(autouse=True)
def no_state_of_before() -> Iterator[None]:
    """Forget the Accelerators of other tests, before and after."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def _accelerator(
    *,
    micro_batch_size: int | None = 2,
    trainer_accumulates: bool = False,
    by_script: bool = True,
    **options: Any,
) -> tuple[Any, Changes]:
    class Hooked(Accelerator):  # type: ignore[misc]
        _zerofit_by_script = by_script

    changes = Changes(announce=False)
    settings: Any = SimpleNamespace(
        micro_batch_size=micro_batch_size, trainer_accumulates=trainer_accumulates
    )
    install(Hooked, settings, changes)
    return Hooked(cpu=True, **options), changes


def _backward(accelerator: Any, loss: Any) -> None:
    accelerator._zerofit_splitter.backward(loss, run=lambda one, _: one.backward(), is_boundary=True)


@pytest.mark.parametrize(
    ("options", "is_split"),
    [
        ({}, True),
        ({"micro_batch_size": None}, False),
        ({"trainer_accumulates": True}, True),
        ({"by_script": False}, True),
        ({"by_script": False, "trainer_accumulates": True}, False),
    ],
)
def test_which_models_are_split(options: dict[str, Any], is_split: bool, tiny: Tiny) -> None:
    accelerator, changes = _accelerator(**options)
    model, batch = tiny("vit")
    prepared = accelerator.prepare(model)
    assert hasattr(accelerator, "_zerofit_splitter") == is_split
    prepared(**batch)
    prepared(**batch)
    said = ("each forward pass of 5 samples runs as 3 micro-batches of at most 2",) if is_split else ()
    assert changes.lines == said


def test_preparing_twice_splits_once(tiny: Tiny) -> None:
    accelerator, _ = _accelerator()
    model, batch = tiny("vit")
    accelerator.prepare(accelerator.prepare(model))
    calls = []
    model.classifier.register_forward_hook(lambda *_: calls.append(1))
    _backward(accelerator, model(**batch).loss)
    assert len(calls) == 4 + 3 + 3


def test_a_step_without_backward_takes_back_what_went_early(
    tiny: Tiny, gradients: Callable[..., Any]
) -> None:
    accelerator, _ = _accelerator()
    model, batch = tiny("vit")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(2):
        _backward(accelerator, model(**batch).loss)
        gradients(model)
    before = copy.deepcopy(model.state_dict())
    kept = model(**batch).loss
    assert kept is not None
    optimizer.step()
    for name, one in model.state_dict().items():
        torch.testing.assert_close(one, before[name], rtol=0, atol=1e-6)


def test_the_signature_is_the_models_own(tiny: Tiny) -> None:
    accelerator, _ = _accelerator()
    model, _ = tiny("vit")
    expected = list(inspect.signature(model.forward).parameters)
    assert list(inspect.signature(accelerator.prepare(model).forward).parameters) == expected


def test_a_copy_runs_by_itself(tiny: Tiny) -> None:
    accelerator, _ = _accelerator()
    model, batch = tiny("vit")
    averaged = copy.deepcopy(accelerator.prepare(model))
    for parameter in averaged.parameters():
        parameter.data.zero_()
    assert averaged(**batch).logits.abs().sum() == 0
    assert model(**batch).logits.abs().sum() > 0


def test_a_whole_model_can_be_saved() -> None:
    accelerator, _ = _accelerator()
    model = accelerator.prepare(torch.nn.Linear(3, 2))
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    assert torch.equal(loaded(torch.ones(1, 3)), model(torch.ones(1, 3)))


def test_bf16_of_accelerate_reaches_every_piece(
    tiny: Tiny, gradients: Callable[..., Any], assert_equal: Callable[..., None]
) -> None:
    plain = Accelerator(cpu=True, mixed_precision="bf16")
    whole, batch = tiny("gpt2")
    outputs = plain.prepare(whole)(**batch)
    outputs.loss.backward()
    expected = gradients(whole)
    accelerator, _ = _accelerator(mixed_precision="bf16")
    model = accelerator.prepare(tiny("gpt2")[0])
    for _ in range(3):
        split = model(**batch)
        assert split.logits.dtype == outputs.logits.dtype == torch.float32
        _backward(accelerator, split.loss)
        assert_equal(gradients(model), expected, within=0.03)


def test_a_compiled_model(
    tiny: Tiny, gradients: Callable[..., Any], assert_equal: Callable[..., None]
) -> None:
    accelerator, changes = _accelerator()
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)), None
    x = torch.randn(5, 3)
    model(x).pow(2).mean().backward()
    expected = gradients(model)
    compiled = accelerator.prepare(torch.compile(model, backend="eager"))
    for _ in range(3):
        _backward(accelerator, compiled(x).pow(2).mean())
        assert_equal(gradients(model), expected)
    assert len(changes.lines) == 1
