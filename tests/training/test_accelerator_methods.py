"""Hooks on one Accelerator without DeepSpeed: accumulation, clipping and batches as the plan says."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import DeepSpeedPlugin
from accelerators import hooked, own_class, quiet, settings
from captures import LOOP
from refusals import refusal
from torch.utils.data import DataLoader

from zerofit.core.plan import Topology
from zerofit.training.hooks import install_accelerator
from zerofit.training.setup.batch_size import install_batch_search


def parts() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=1.0), DataLoader(torch.randn(8, 4), batch_size=2)


@pytest.mark.parametrize(
    ("script_clips", "line"),
    [
        (None, "gradients are clipped to 0.01; the script does not clip"),
        (5.0, "gradients are clipped to 0.01 (0 is off); the script says 5"),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_clipping_of_the_plan(script_clips: float | None, line: str, at_once: bool) -> None:
    accelerator_class, changes = hooked(gradient_clipping=0.01)
    accelerator = accelerator_class()
    model, optimizer, loader = parts()
    if at_once:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    else:
        optimizer = accelerator.prepare_optimizer(optimizer)
    for batch in loader:
        before = [parameter.detach().clone() for parameter in model.parameters()]
        accelerator.backward(model(batch).square().mean())
        if script_clips:
            accelerator.clip_grad_norm_(model.parameters(), script_clips)
        optimizer.step()
        optimizer.zero_grad()
        moved = [now - then for now, then in zip(model.parameters(), before, strict=True)]
        assert torch.cat([step.flatten() for step in moved]).norm().item() == pytest.approx(0.01, rel=1e-3)
    assert changes.lines == (line,)


@pytest.mark.parametrize("uses_deepspeed", [True, False])
def test_a_script_that_asks_for_the_cpu_does_not_switch_deepspeed_off(
    uses_deepspeed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    accelerator_class, changes = own_class(), quiet()
    original = accelerator_class.__init__

    def init(self: Any, *, cpu: bool = False) -> None:
        given.append(cpu)
        original(self)
        config = {"zero_optimization": {"stage": 2}}
        self.state = SimpleNamespace(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))

    monkeypatch.setattr(accelerator_class, "__init__", init)
    kind = "DEEPSPEED" if uses_deepspeed else "NO"
    monkeypatch.setattr(accelerator_class, "distributed_type", kind)
    wanted = settings(uses_deepspeed=uses_deepspeed)
    wanted = replace(wanted, plan=replace(wanted.plan, topology=Topology(world_size=1, on_cpu=True)))
    install_accelerator(accelerator_class, wanted, changes)
    accelerator_class(cpu=True)
    line = "the ranks run on the CPU as the plan says; cpu=True would switch DeepSpeed off"
    assert (given, changes.lines) == (([False], (line,)) if uses_deepspeed else ([True], ()))


def test_forced_accumulation_reaches_accumulate() -> None:
    accelerator_class, changes = hooked(gradient_accumulation_steps=2)
    accelerator = accelerator_class(gradient_accumulation_steps=4)
    model, _, loader = accelerator.prepare(*parts())
    synced = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            synced.append(accelerator.sync_gradients)
    assert synced == [False, True, False, True]
    assert changes.lines[0].startswith("gradient accumulation is 2 steps; the script says 4")


def test_forced_accumulation_outside_accumulate_is_refused() -> None:
    accelerator_class, _ = hooked(gradient_accumulation_steps=2)
    accelerator = accelerator_class()
    model, _, loader = accelerator.prepare(*parts())
    refused = refusal(accelerator.backward, model(next(iter(loader))).square().mean())
    assert refused.rule == "script-does-not-accumulate"


def test_pieces_leave_the_scripts_accumulation_alone() -> None:
    accelerator_class, changes = hooked(micro_batch_size=1, gradient_accumulation_steps=2)
    accelerator = accelerator_class()
    model, _, loader = accelerator.prepare(*parts())
    accelerator.backward(model(next(iter(loader))).square().mean())
    assert accelerator.gradient_accumulation_steps == 1
    assert changes.lines == ("each forward pass of 2 samples runs as 2 micro-batches of 1",)


@pytest.mark.parametrize(
    ("wanted", "rule"),
    [
        ({"micro_batch_size": 4}, "micro-batch-too-large"),
        ({"global_batch_size": 4}, "global-batch-differs"),
    ],
)
def test_prepare_holds_the_scripts_batch_against_the_plan(wanted: dict[str, int], rule: str) -> None:
    accelerator_class, _ = hooked(**wanted)
    assert refusal(accelerator_class().prepare, *parts()).rule == rule


@pytest.mark.parametrize("at_once", [True, False])
def test_a_second_smaller_training_loader_is_no_matter(at_once: bool) -> None:
    accelerator_class, _ = hooked(micro_batch_size=2)
    accelerator = accelerator_class()
    model, optimizer, _ = parts()
    small, large = (DataLoader(torch.randn(8, 4), batch_size=size, shuffle=True) for size in (1, 4))
    if at_once:
        accelerator.prepare(model, optimizer, small, large)
    else:
        accelerator.prepare(model, optimizer, large)
        accelerator.prepare(small)


def test_of_two_loaders_that_shuffle_the_captured_one_trains() -> None:
    """huggan's pix2pix shuffles what it draws its sample pictures from, in larger batches."""
    accelerator_class, changes = own_class(), quiet()
    wanted = settings(micro_batch_size=2, gradient_accumulation_steps=2)
    captured = replace(LOOP, micro_batch_size=4, gradient_accumulation_steps=1)
    wanted = replace(wanted, plan=replace(wanted.plan, capture=captured))
    install_accelerator(accelerator_class, wanted, changes)
    model, optimizer, _ = parts()
    trains, shown = (DataLoader(torch.randn(12, 4), batch_size=size, shuffle=True) for size in (4, 6))
    accelerator = accelerator_class()
    model, _, loader, _ = accelerator.prepare(model, optimizer, trains, shown)
    accelerator.backward(model(next(iter(loader))).square().mean())
    assert changes.lines == ("each forward pass of 4 samples runs as 2 micro-batches of 2",)


@pytest.mark.parametrize("micro_batch_size", [None, 1])
def test_a_loss_scale_holds_for_pieces_and_overflow_skips_step_and_scheduler(
    micro_batch_size: int | None,
) -> None:
    accelerator_class, _ = hooked(micro_batch_size=micro_batch_size)
    accelerator = accelerator_class()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # as under fp16 on a GPU
    model, optimizer, loader = parts()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for number, batch in enumerate(loader):
        before = model.weight.detach().clone()
        outputs = torch.nn.functional.linear(batch, model.weight, model.bias)
        expected = torch.autograd.grad(outputs.square().mean(), model.weight)[0]
        rate = scheduler.get_last_lr()[0]
        overflows = number == 1
        accelerator.backward(model(batch).square().mean() * (float("inf") if overflows else 1.0))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        assert accelerator.optimizer_step_was_skipped is overflows
        assert (scheduler.get_last_lr()[0] == rate) is overflows
        step = torch.zeros_like(before) if overflows else rate * expected
        torch.testing.assert_close(before - model.weight, step)


@pytest.mark.parametrize("recovers", [True, False])
def test_a_batch_size_is_searched_only_where_no_other_plan_is_tried(
    *, recovers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.utils import memory

    monkeypatch.setattr(memory, "should_reduce_batch_size", memory.should_reduce_batch_size)
    changes = quiet()
    install_batch_search(memory, settings(recovers=recovers), changes)
    tried = []

    @memory.find_executable_batch_size(starting_batch_size=16)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        if batch_size > 14:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return batch_size

    if recovers:
        with pytest.raises(torch.OutOfMemoryError):
            train()
        assert tried == [16]
        assert changes.lines[0].endswith("the run is restarted with another plan")
    else:
        assert train() == 14
        assert changes.lines == (
            "find_executable_batch_size reduces the batch size: the global batch size is not the plan's",
        )
    with pytest.raises(ValueError, match="mine"):
        memory.find_executable_batch_size(_raise_other, starting_batch_size=4)()


def _raise_other(batch_size: int) -> None:
    raise ValueError("mine")
