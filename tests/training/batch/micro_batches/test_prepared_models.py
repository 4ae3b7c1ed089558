"""The hook on Accelerator.prepare(), and what the model that it returns still can do."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import io
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerators import forget_accelerators, quiet, settings, wrap_all
from split_models import assert_equal, gradients, tiny

from zerofit.training.batch.micro_batches import hooks
from zerofit.training.batch.micro_batches.split_model import SplitModel, unwrapped
from zerofit.training.changes import Changes


def _accelerator(
    *,
    micro_batch_size: int | None = 2,
    trainer_accumulates: bool = False,
    by_script: bool = True,
    **options: Any,
) -> tuple[Any, Changes]:
    class Hooked(Accelerator):  # type: ignore[misc]
        _zerofit_by_script = by_script

    changes = quiet()
    wanted = settings(micro_batch_size=micro_batch_size, trainer_accumulates=trainer_accumulates)
    wrap_all(Hooked, hooks.wrappers(Hooked, wanted, changes))
    return Hooked(cpu=True, **options), changes


def _backward(accelerator: Any, loss: Any) -> None:
    accelerator._zerofit_pending_backward.backward(loss, run=lambda one, _: one.backward(), is_boundary=True)


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
def test_which_models_are_split(options: dict[str, Any], is_split: bool) -> None:
    accelerator, changes = _accelerator(**options)
    model, batch = tiny("vit")
    prepared = accelerator.prepare(model)
    assert hasattr(accelerator, "_zerofit_pending_backward") == is_split
    prepared(**batch)
    prepared(**batch)
    said = ("each forward pass of 5 samples runs as 3 micro-batches of at most 2",) if is_split else ()
    assert changes.lines == said


@pytest.mark.parametrize(
    ("options", "is_split"),
    [({}, True), ({"evaluation_mode": True}, False), ({"device_placement": False}, True)],
)
def test_prepare_model_splits_what_it_prepares_for_training(options: dict[str, bool], is_split: bool) -> None:
    accelerator, changes = _accelerator()
    model, batch = tiny("vit")
    accelerator.prepare_model(model, **options)(**batch)
    assert hasattr(accelerator, "_zerofit_pending_backward") == is_split
    assert bool(changes.lines) == is_split


@pytest.mark.parametrize(
    ("kind", "num_ranks", "plugin_stage", "stage"),
    [
        ("DistributedType.DEEPSPEED", 2, 2, 2),
        ("DistributedType.DEEPSPEED", 1, 2, 0),
        ("DistributedType.FSDP", 2, None, 3),
        ("DistributedType.MULTI_GPU", 2, None, 0),
        ("DistributedType.MULTI_GPU", 2, 2, 0),
    ],
)
def test_ranks_run_in_step_where_gradients_are_partitioned(
    kind: str, num_ranks: int, plugin_stage: int | None, stage: int
) -> None:
    plugin = None if plugin_stage is None else SimpleNamespace(zero_stage=plugin_stage)
    state = SimpleNamespace(deepspeed_plugin=plugin)
    accelerator = SimpleNamespace(distributed_type=kind, num_processes=num_ranks, state=state)
    assert hooks._stage(accelerator) == stage


def _plain() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(2, 2))


def _under_accelerates_autocast(is_inner: bool) -> Any:
    model = _plain()
    compiled = torch.nn.Module()
    compiled._orig_mod = model
    (model if is_inner else compiled)._original_forward = None
    return compiled


@pytest.mark.parametrize(
    ("make", "autocast", "is_half"),
    [
        (_plain, False, False),
        (_plain, True, True),
        (lambda: _plain().bfloat16(), False, True),
        (lambda: _under_accelerates_autocast(is_inner=True), False, True),
        (lambda: _under_accelerates_autocast(is_inner=False), False, True),
    ],
    ids=["fp32", "the script's autocast", "bf16 weights", "autocast of the model", "autocast around it"],
)
def test_each_way_to_compute_in_16_bits_is_seen(
    make: Callable[[], Any], *, autocast: bool, is_half: bool
) -> None:
    model = SplitModel(make(), no_sync=contextlib.nullcontext)
    model.note_devices()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert model.is_half is is_half


def test_a_batch_without_tensors_to_split_is_said_to_run_whole() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 1)

        def forward(self, batch: Any) -> Any:
            return self.linear(batch.x)

    accelerator, changes = _accelerator()
    model = accelerator.prepare(Model())
    model(SimpleNamespace(x=torch.randn(6, 3)))
    assert changes.lines == (
        "forward passes are not split into micro-batches: no argument has a batch dimension",
    )


def test_a_step_without_backward_takes_back_what_went_early() -> None:
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


class _Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(3, 1)

    def forward(self, x: Any, labels: Any) -> Any:
        return {"loss": (self.linear(x).squeeze(1) - labels).pow(2).mean()}


def _scaled_accelerator(loss_scale: float, **options: Any) -> Any:
    """Return an Accelerator that scales losses as under fp16 on a GPU."""
    accelerator, _ = _accelerator(**options)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=loss_scale)
    return accelerator


def _scaled_backward(accelerator: Any, loss: Any) -> None:
    def run(piece: Any, _: bool) -> None:
        accelerator.scaler.scale(piece).backward()

    pending = getattr(accelerator, "_zerofit_pending_backward", None)
    if pending is not None and pending.is_any:
        pending.backward(loss, run=run, is_boundary=True)
    else:
        run(loss, True)


@pytest.mark.parametrize("clips", [False, True])
def test_a_skipped_loss_is_taken_back_before_gradients_are_unscaled(clips: bool) -> None:
    def weights(micro_batch_size: int | None) -> Any:
        accelerator = _scaled_accelerator(1024.0, micro_batch_size=micro_batch_size)
        model = _Regression()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer = accelerator.prepare(model, optimizer)
        # What unscale_gradients() asks for; set after prepare(), which would cast to 16 bits.
        accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
        numbers = torch.Generator().manual_seed(3)
        for step in range(6):
            x, labels = torch.randn(6, 3, generator=numbers), torch.randn(6, generator=numbers)
            loss = model(x=x, labels=labels)["loss"]
            if step == 3:
                continue
            _scaled_backward(accelerator, loss)
            if clips:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        forget_accelerators()
        return model.linear.weight.detach()

    torch.testing.assert_close(weights(2), weights(None), rtol=1e-5, atol=1e-6)


def test_one_model_on_two_accelerators_runs_under_the_second() -> None:
    def weights(micro_batch_size: int | None) -> Any:
        model: Any = _Regression()
        numbers = torch.Generator().manual_seed(3)
        for loss_scale in (1024.0, 64.0):
            accelerator = _scaled_accelerator(loss_scale, micro_batch_size=micro_batch_size)
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
            model, optimizer = accelerator.prepare(model, optimizer)
            for _ in range(4):
                x, labels = torch.randn(6, 3, generator=numbers), torch.randn(6, generator=numbers)
                loss = model(x=x, labels=labels)["loss"]
                assert micro_batch_size is None or accelerator._zerofit_pending_backward.is_any
                _scaled_backward(accelerator, loss)
                optimizer.step()
                optimizer.zero_grad()
        return model.linear.weight.detach()

    torch.testing.assert_close(weights(2), weights(None), rtol=1e-5, atol=1e-6)


def test_a_model_that_is_prepared_twice_and_its_copy_are_split_once() -> None:
    accelerator, _ = _accelerator()
    model, batch = tiny("vit")
    expected = list(inspect.signature(model.forward).parameters)
    prepared = accelerator.prepare(accelerator.prepare(model))
    assert list(inspect.signature(prepared.forward).parameters) == expected
    averaged = copy.deepcopy(prepared)
    copied = accelerator.prepare(copy.deepcopy(prepared))
    calls: list[Any] = []
    model.classifier.register_forward_hook(lambda *_: calls.append(1))
    copied.classifier.register_forward_hook(lambda *_: calls.append(2))
    for one, number in ((prepared, 1), (copied, 2)):
        calls.clear()
        _backward(accelerator, one(**batch).loss)
        assert calls == [number] * (4 + 3 + 3)
    for parameter in averaged.parameters():
        parameter.data.zero_()
    assert averaged(**batch).logits.abs().sum() == 0
    assert model(**batch).logits.abs().sum() > 0


@pytest.mark.parametrize("name", ["free_memory", "clear"])
def test_freed_models_are_let_go(name: str) -> None:
    accelerator, _ = _accelerator()
    model: Any = _Regression()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    alive = weakref.ref(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    _backward(accelerator, model(x=torch.randn(6, 3), labels=torch.randn(6))["loss"])
    optimizer.step()
    model, optimizer = getattr(accelerator, name)(model, optimizer)
    gc.collect()
    assert alive() is None


def test_a_whole_model_can_be_saved() -> None:
    accelerator, _ = _accelerator()
    model = accelerator.prepare(torch.nn.Linear(3, 2))
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    assert torch.equal(loaded(torch.ones(1, 3)), model(torch.ones(1, 3)))


def test_bf16_of_accelerate_reaches_every_piece() -> None:
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


def test_a_compiled_model() -> None:
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


class _Holder(torch.nn.Module):
    """A script's model that has another as its part, named as wrappers name theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(2, 1)


def test_a_model_is_unwrapped_from_what_wraps_models_alone() -> None:
    holder = _Holder()
    wrapper = type("DistributedDataParallel", (_Holder,), {})()
    wrapper.module = holder
    assert unwrapped(holder) is holder
    assert unwrapped(wrapper) is holder
    assert unwrapped(torch.compile(holder)) is holder
