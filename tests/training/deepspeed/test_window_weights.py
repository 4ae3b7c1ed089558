"""Windows that zerofit sets take the steps of one batch of all their samples, the short last one too."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerators import own_class, quiet, settings
from torch.nn import functional
from torch.utils.data import DataLoader
from trainer_training import TOKENS, causal_model

from zerofit.training import accelerate_hooks, backward, clipping, micro_batches

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 4
"""Batches in a window. Of 6 batches of 3 samples and one of 1 come windows of 12 and, in 3 batches, of 7."""
SAMPLES, BATCH_SIZE, RATE = 19, 3, 0.5
SAME = 1e-5
"""Relative, in fp32."""


def ragged(sample: list[dict[str, Any]]) -> dict[str, Any]:
    """Return sentences of 2 to 9 tokens as one batch, padded to the longest."""
    return dict(TOKENS["collator"]()(sample))


def sentence(sample: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the same with one label a sentence."""
    labels = torch.tensor([one["labels"][0] for one in sample])
    return {**ragged(sample), "labels": labels}


def language(sample: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the same with the next tokens as labels."""
    batch = ragged(sample)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return {**batch, "labels": labels}


def classifier(**more: Any) -> Any:
    from transformers import BertConfig, BertForSequenceClassification, set_seed

    set_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(
        BertConfig(vocab_size=64, **{"num_labels": 3, **sizes, **no_dropout, **more})
    )


def own_loss(model: Any, batch: dict[str, Any]) -> Any:
    """The model's."""
    return model(**batch).loss


def scripts_loss(model: Any, batch: dict[str, Any]) -> Any:
    """One that the script takes of the outputs, over the tokens that have a label."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    "classification": (classifier, sentence, own_loss),
    "several labels": (
        lambda: classifier(problem_type="multi_label_classification"),
        lambda sample: {
            **(made := sentence(sample)),
            "labels": functional.one_hot(made["labels"], 3).float(),
        },
        own_loss,
    ),
    "token classification": (TOKENS["tiny_model"], ragged, own_loss),
    "causal language model": (causal_model, language, own_loss),
    "a loss of the script's": (TOKENS["tiny_model"], ragged, scripts_loss),
}


def big_batches(kind: str, *, clip: float | None = None, rate: float = RATE) -> list[torch.Tensor]:
    """Return the weights after one step a window, of one batch of all its samples, in plain torch."""
    make, collate, loss_of = KINDS[kind]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for batch in DataLoader(TOKENS["samples"](SAMPLES), batch_size=STEPS * BATCH_SIZE, collate_fn=collate):
        loss_of(model, batch).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def windows(
    kind: str, *, clip: float | None = None, set_by_plan: bool = True, **arguments: Any
) -> tuple[list[torch.Tensor], tuple[str, ...]]:
    """Return the weights after a script's loop with accumulate(), and what was noted."""
    accelerator_class, changes = own_class(), quiet()
    plan = settings(gradient_accumulation_steps=STEPS if set_by_plan else None)
    for part in (accelerate_hooks, backward):
        part.install(accelerator_class, plan, changes)
    clipping.install(accelerator_class, changes, forced=None)
    own = {"gradient_accumulation_steps": 1 if set_by_plan else STEPS}
    accelerator = accelerator_class(**{**own, **arguments})
    make, collate, loss_of = KINDS[kind]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loader = DataLoader(TOKENS["samples"](SAMPLES), batch_size=BATCH_SIZE, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters()), changes.lines


def distance(ours: list[torch.Tensor], theirs: list[torch.Tensor], start: list[torch.Tensor]) -> float:
    """Return how far two trainings are apart, of how far they went."""
    apart, went = (
        torch.cat([(one - other).detach().flatten() for one, other in zip(first, second, strict=True)]).norm()
        for first, second in ((ours, theirs), (theirs, start))
    )
    return float(apart / went)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_window_steps_as_one_batch_of_its_samples(kind: str, clip: float | None) -> None:
    ours, lines = windows(kind, clip=clip)
    start = list(KINDS[kind][0]().parameters())
    assert distance(ours, big_batches(kind, clip=clip), start) < SAME
    assert any(line.startswith("each batch of a window counts by the labels or elements") for line in lines)


@pytest.mark.parametrize("kind", ["classification", "causal language model", "a loss of the script's"])
def test_a_batch_split_into_micro_batches_steps_as_the_whole(kind: str) -> None:
    """Batches of 12 and of 7 samples, in forward passes of 2 at most."""
    accelerator_class, changes = own_class(), quiet()
    plan = settings(micro_batch_size=2)
    for part in (accelerate_hooks, micro_batches, backward):
        part.install(accelerator_class, plan, changes)
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
    start = list(make().parameters())
    assert distance(list(model.parameters()), big_batches(kind), start) < SAME


def test_a_loss_scale_and_its_skipped_step_go_with_the_weights() -> None:
    """As under fp16: gradients that overflow are skipped, and the next window begins anew."""
    accelerator_class, changes = own_class(), quiet()
    for part in (accelerate_hooks, backward):
        part.install(accelerator_class, settings(gradient_accumulation_steps=2), changes)
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
    start = list(KINDS["classification"][0]().parameters())
    assert distance(ours, big_batches("classification"), start) < SAME
    assert len(lines) == 1


@pytest.mark.parametrize("kind", ["classification", "causal language model"])
def test_accelerate_by_itself_does_not(kind: str) -> None:
    """What the script sets itself stays as accelerate has it, and is what these tests can see."""
    ours, lines = windows(kind, set_by_plan=False)
    start = list(KINDS[kind][0]().parameters())
    assert distance(ours, big_batches(kind), start) > 0.05
    assert lines == ()


def test_a_loss_that_does_not_tell_is_left_to_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    make, collate, loss_of = KINDS["token classification"]
    rooted = (make, collate, lambda model, batch: loss_of(model, batch).sqrt())
    monkeypatch.setitem(KINDS, "rooted", rooted)
    ours, lines = windows("rooted")
    stock, _ = windows("rooted", set_by_plan=False)
    assert all(torch.equal(one, other) for one, other in zip(ours, stock, strict=True))
    assert lines[-1] == (
        "the batches of a window count as accelerate has them, each the same and a shorter window less: the "
        "loss does not tell what it is a mean over"
    )


def test_a_batch_without_labels_counts_nothing() -> None:
    """Its loss is no number, and the big batch's is one."""
    accelerator_class, changes = own_class(), quiet()
    for part in (accelerate_hooks, backward):
        part.install(accelerator_class, settings(gradient_accumulation_steps=2), changes)
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
    accelerator_class, changes = own_class(), quiet()
    for part in (accelerate_hooks, backward):
        part.install(accelerator_class, settings(gradient_accumulation_steps=2), changes)
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
    accelerator_class, changes = own_class(), quiet()
    for part in (accelerate_hooks, backward):
        part.install(accelerator_class, settings(gradient_accumulation_steps=2), changes)
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
    accelerator_class, changes = own_class(), quiet()
    accelerate_hooks.install(accelerator_class, settings(gradient_accumulation_steps=4), changes)
    accelerator = accelerator_class(gradient_accumulation_steps=4)
    accelerator.gradient_accumulation_steps = 2
    assert accelerator.gradient_accumulation_steps == 4
    assert changes.lines == ("gradient accumulation stays 4 steps; the script sets it to 2 later",)
