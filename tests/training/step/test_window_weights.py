"""Windows that zerofit sets take the steps of one batch of all their samples, the short last one too."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerators import hooked
from torch.nn import functional
from torch.utils.data import DataLoader
from trainer_training import TOKENS
from window_trainings import BATCH_SIZE, KINDS, RATE, SAME, SAMPLES, STEPS, off_from_big_batches, windows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_window_steps_as_one_batch_of_its_samples(kind: str, clip: float | None) -> None:
    ours, lines = windows(kind, clip=clip)
    assert off_from_big_batches(ours, kind, clip=clip) < SAME
    assert any(
        line.startswith("batches of a window are weighted by the labels or elements") for line in lines
    )


@pytest.mark.parametrize("kind", ["classification", "causal language model", "a loss of the script's"])
def test_a_batch_split_into_micro_batches_steps_as_the_whole(kind: str) -> None:
    """Batches of 12 and of 7 samples, in forward passes of 2 at most."""
    accelerator_class, _ = hooked(micro_batch_size=2)
    accelerator = accelerator_class()
    make, collate, loss_of = KINDS[kind]
    model, sizes = make(), set[int]()
    model.get_input_embeddings().register_forward_pre_hook(
        lambda module, inputs: sizes.add(len(inputs[0])) if module.training else None
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loader = DataLoader(TOKENS["samples"](SAMPLES), batch_size=STEPS * BATCH_SIZE, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    assert sizes == {1, 2}
    assert off_from_big_batches(list(model.parameters()), kind) < SAME


def test_a_loss_scale_and_its_skipped_step_go_with_the_weights() -> None:
    """As under fp16: gradients that overflow are skipped, and the next window begins anew."""
    accelerator_class, _ = hooked(gradient_accumulation_steps=2)
    accelerator = accelerator_class()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    net = torch.nn.Linear(4, 1)
    inputs = torch.randn(10, 4)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for rows in ((slice(2), slice(2, 5)), (slice(5, 9), slice(9, 10))):
        whole = inputs[rows[0].start or 0 : rows[1].stop]
        expected = torch.autograd.grad(net(whole).square().mean(), net.weight)[0]
        before, overflows = net.weight.detach().clone(), rows[0].start is None
        for number, part in enumerate(rows):
            with accelerator.accumulate(model):
                factor = float("inf") if overflows and number else 1.0
                accelerator.backward(model(inputs[part]).square().mean() * factor)
                optimizer.step()
                optimizer.zero_grad()
        assert accelerator.optimizer_step_was_skipped is overflows
        step = torch.zeros_like(before) if overflows else 0.1 * expected
        torch.testing.assert_close(before - net.weight, step, rtol=1e-4, atol=1e-7)


def test_a_number_that_the_script_has_too_is_weighted_all_the_same() -> None:
    ours, lines = windows("classification", gradient_accumulation_steps=STEPS)
    assert off_from_big_batches(ours, "classification") < SAME
    assert len(lines) == 1


@pytest.mark.parametrize("kind", ["classification", "causal language model"])
def test_accelerate_by_itself_does_not(kind: str) -> None:
    """What the script sets itself stays as accelerate has it, and is what these tests can see."""
    ours, lines = windows(kind, set_by_plan=False)
    assert off_from_big_batches(ours, kind) > 0.05
    assert lines == ()


def test_a_loss_that_does_not_tell_is_left_to_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    make, collate, loss_of = KINDS["token classification"]
    rooted = (make, collate, lambda model, batch: loss_of(model, batch).sqrt())
    monkeypatch.setitem(KINDS, "rooted", rooted)
    ours, lines = windows("rooted")
    stock, _ = windows("rooted", set_by_plan=False)
    assert all(torch.equal(one, other) for one, other in zip(ours, stock, strict=True))
    assert lines[-1] == (
        "batches of a window are weighted equally, as in accelerate, and a shorter last window less: the "
        "loss does not show what it is averaged over"
    )


def test_a_batch_without_labels_counts_nothing() -> None:
    """Its loss is no number, and the big batch's is one."""
    accelerator_class, _ = hooked(gradient_accumulation_steps=2)
    accelerator = accelerator_class()
    net = torch.nn.Linear(4, 3)
    inputs, labels = torch.randn(6, 4), torch.tensor([1, 2, 0, -100, -100, -100])
    expected = copy.deepcopy(net)
    functional.cross_entropy(expected(inputs), labels).backward()
    model, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
    for half in (slice(3), slice(3, 6)):
        with accelerator.accumulate(model):
            accelerator.backward(functional.cross_entropy(model(inputs[half]), labels[half]))
    for ours, theirs in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=SAME, atol=1e-8)


def test_two_losses_of_one_batch_count_alike() -> None:
    accelerator_class, _ = hooked(gradient_accumulation_steps=2)
    accelerator = accelerator_class()
    net = torch.nn.Linear(4, 1)
    inputs = torch.randn(5, 4)
    expected = copy.deepcopy(net)
    (expected(inputs).square().mean() + expected(-inputs).abs().mean()).backward()
    model, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
    for rows in (slice(3), slice(3, 5)):
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs[rows]).square().mean())
            accelerator.backward(model(-inputs[rows]).abs().mean())
    for ours, theirs in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=SAME, atol=1e-8)


@pytest.mark.parametrize("left_out", [0, 1, 3])
@pytest.mark.parametrize("clips", [False, True])
def test_a_backward_pass_that_a_script_leaves_out_changes_its_own_window_alone(
    left_out: int, clips: bool
) -> None:
    """As where a loss is no number: the step is that of the batches that went backward."""
    accelerator_class, _ = hooked(gradient_accumulation_steps=2)
    accelerator = accelerator_class()
    net = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
    sizes = [4, 2, 3, 1, 4, 4]
    batches = torch.split(torch.randn(sum(sizes), 4), sizes)
    for number, batch in enumerate(batches):
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            if number != left_out:
                accelerator.backward(loss)
            if not accelerator.sync_gradients:
                continue
            whole = [batches[one] for one in (number - 1, number) if one != left_out]
            expected = torch.autograd.grad(net(torch.cat(whole)).square().mean(), net.weight)[0]
            if clips:
                norm = accelerator.clip_grad_norm_(net.parameters(), 1e-3)
                assert float(norm) >= float(expected.norm()) * (1 - SAME)
                expected = expected * 1e-3 / norm
            before = net.weight.detach().clone()
            optimizer.step()
            optimizer.zero_grad()
            torch.testing.assert_close(before - net.weight, expected, rtol=1e-3, atol=1e-6)


def test_an_accumulation_that_the_script_sets_later_gives_way() -> None:
    accelerator_class, changes = hooked(gradient_accumulation_steps=4)
    accelerator = accelerator_class(gradient_accumulation_steps=4)
    accelerator.gradient_accumulation_steps = 2
    assert accelerator.gradient_accumulation_steps == 4
    assert changes.lines == ("gradient accumulation stays 4 steps; the script sets it to 2 later",)
