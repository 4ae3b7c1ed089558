"""Training loops in every style: what is backpropagated, when, and how often the model runs."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from split_models import assert_equal, gradients, split, tiny


def pair(name: str, **options: Any) -> Any:
    """Return the same model twice, as it is and split into pieces of two, and a batch."""
    whole, batch = tiny(name)
    model, _ = tiny(name)
    return whole, split(model, 2, **options), batch


def trust(made: Any, batch: dict[str, Any]) -> None:
    """Let the model be sure of the script's gradient, so that pieces go backward early from now on."""
    for _ in range(2):
        made.backward(made.model(**batch).loss)
        made.model.zero_grad()


def two_forward_passes(model: Any, batch: Any, backward: Any) -> None:
    one, two = model(**batch), model(**{**batch, "pixel_values": batch["pixel_values"].flip(0)})
    backward(one.loss + 2 * two.loss + (one.logits - two.logits).pow(2).mean())


def two_losses_with_a_backward_each(model: Any, batch: Any, backward: Any) -> None:
    one, two = model(**batch).loss * 3, model(**batch).loss
    backward(one, is_boundary=False)
    backward(two)


def a_second_backward_through_a_kept_graph(model: Any, batch: Any, backward: Any) -> None:
    outputs = model(**batch)
    backward(outputs.loss, retain_graph=True)
    backward(outputs.logits.sum())


def a_loss_of_parameters_too(model: Any, batch: Any, backward: Any) -> None:
    outputs = model(**batch)
    backward(outputs.loss + sum(one.pow(2).sum() for one in model.parameters()))


def without_the_accelerator(model: Any, batch: Any, backward: Any) -> None:
    (model(**batch).loss * 3).backward()


def with_activation_checkpointing(model: Any, batch: Any, backward: Any) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    backward(model(**batch).loss)


@pytest.mark.parametrize(
    ("name", "loop"),
    [
        ("vit", two_forward_passes),
        ("vit", two_losses_with_a_backward_each),
        ("vit", a_second_backward_through_a_kept_graph),
        ("vit", a_loss_of_parameters_too),
        ("t5", without_the_accelerator),
        ("gpt2", with_activation_checkpointing),
    ],
)
def test_gradients_are_those_of_the_whole_batch(name: str, loop: Any) -> None:
    whole, made, batch = pair(name)

    def whole_backward(loss: Any, *, retain_graph: bool = False, is_boundary: bool = True) -> None:
        loss.backward(retain_graph=retain_graph)

    def split_backward(loss: Any, *, retain_graph: bool = False, is_boundary: bool = True) -> None:
        assert made.pending.is_any
        made.backward(loss, is_boundary=is_boundary)

    loop(whole, batch, whole_backward)
    expected = gradients(whole)
    for _ in range(4):
        made.boundaries.clear()
        loop(made.model, batch, split_backward)
        assert_equal(gradients(made.model), expected)
        assert made.boundaries[-1:] == ([] if loop is without_the_accelerator else [True])


def test_a_loss_without_any_output_of_the_model() -> None:
    _, made, batch = pair("vit")
    kept = made.model(**batch)
    weight = torch.ones(2, requires_grad=True)
    made.backward((weight * 3).sum())
    assert weight.grad.tolist() == [3, 3]
    assert made.boundaries == [True]
    assert kept is not None


def test_a_models_output_as_another_models_input() -> None:
    from zerofit.training.batch.micro_batches.pending_backward import PendingBackward

    torch.manual_seed(0)
    first, second, x = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2), torch.randn(6, 3)
    second(first(x).relu()).pow(2).mean().backward()
    expected = gradients(first), gradients(second)
    pending = PendingBackward()
    made, other = split(first, pending=pending), split(second, pending=pending)
    for _ in range(4):
        made.backward(second(first(x).relu()).pow(2).mean())
        assert_equal(gradients(first), expected[0])
        assert_equal(gradients(second), expected[1])
    assert other.changes.lines == (
        "forward passes are not split into micro-batches: an argument requires a gradient",
    )


def test_outputs_that_are_thrown_away_take_everything_with_them() -> None:
    _, made, batch = pair("vit")
    outputs = made.model(**batch)
    assert made.pending.is_any
    del outputs
    gc.collect()
    assert not made.pending.is_any


@pytest.mark.parametrize(
    ("holds_outputs", "clears", "settles"),
    [
        (False, False, True),
        (False, True, True),
        (True, False, True),
        (True, True, True),
        (False, False, False),
    ],
)
def test_a_loss_that_is_skipped_leaves_no_gradient(holds_outputs: bool, clears: bool, settles: bool) -> None:
    whole, made, batch = pair("vit")
    whole(**batch).loss.backward()
    expected = gradients(whole)
    trust(made, batch)
    made.num_forwards = 0
    kept = made.model(**batch)
    assert made.model.vit.layernorm.weight.grad is not None  # two pieces went backward on a guess
    if not holds_outputs:
        del kept
    if clears:
        made.model.zero_grad()
    if settles:
        made.pending.settle()  # else the next forward pass sees that the outputs are gone
    made.backward(made.model(**batch).loss)
    assert_equal(gradients(made.model), expected)


def test_what_a_waiting_loss_depends_on_is_not_taken_back() -> None:
    whole, made, batch = pair("vit")
    whole(**batch).loss.backward()
    expected = gradients(whole)
    trust(made, batch)
    made.num_forwards = 0
    loss = made.model(**batch).loss * 1
    made.pending.settle(except_for=loss)  # as a window does whose backward pass waits
    made.backward(loss)
    assert made.num_forwards == 3
    assert_equal(gradients(made.model), expected)
    skipped, loss = made.model(**batch).loss, made.model(**batch).loss
    made.pending.settle(except_for=loss)
    made.backward(loss)
    assert skipped.isfinite()
    assert_equal(gradients(made.model), expected)


def test_losses_that_are_no_number_are_not_taken_back() -> None:
    whole, made, batch = pair("vit")
    whole(**batch).loss.backward()
    expected = gradients(whole)
    trust(made, batch)
    broken = {**batch, "pixel_values": batch["pixel_values"] * torch.nan}
    assert made.model(**broken).loss.isnan()
    assert gradients(made.model) == {}
    made.backward(made.model(**batch).loss)
    assert_equal(gradients(made.model), expected)


def test_the_model_runs_twice_until_the_gradient_can_be_guessed() -> None:
    _, made, batch = pair("vit")
    counts = []
    for _ in range(4):
        made.num_forwards = 0
        made.backward(made.model(**batch).loss / 4)
        counts.append(made.num_forwards)
    check = 4
    assert counts == [check + 6, 6, 3, 3]
    assert made.changes.lines == ("each forward pass of 5 samples runs as 3 micro-batches of at most 2",)


def test_a_wrong_guess_is_put_right() -> None:
    whole, made, batch = pair("vit")
    counts = []
    for factor in (1, 1, 1, 5, 5, 5, 5, 5, 0.5, 0.5):
        made.num_forwards = 0
        (whole(**batch).loss * factor).backward()
        made.backward(made.model(**batch).loss * factor)
        assert_equal(gradients(made.model), gradients(whole))
        counts.append(made.num_forwards)
    assert counts == [10, 6, 3, 3 + 2, 6, 6, 6, 6, 3 + 2, 6]


def test_a_guess_holds_though_the_logits_are_looked_at_and_is_put_right_when_they_are_used() -> None:
    whole, made, batch = pair("vit")
    for uses_logits in (False, False, False, True, False):
        made.num_forwards = 0
        for model, backward in ((whole, torch.Tensor.backward), (made.model, made.backward)):
            outputs = model(**batch)
            accuracy = (outputs.logits.argmax(-1) == batch["labels"]).float().mean()
            assert 0 <= accuracy <= 1
            backward(outputs.loss + (outputs.logits.pow(2).mean() if uses_logits else 0))
        assert_equal(gradients(made.model), gradients(whole))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_cleared_between_forward_and_backward(set_to_none: bool) -> None:
    whole, made, batch = pair("vit")
    optimizer = torch.optim.SGD(made.model.parameters())
    whole(**batch).loss.backward()
    expected = gradients(whole)
    counts = []
    for _ in range(5):
        made.num_forwards = 0
        loss = made.model(**batch).loss
        optimizer.zero_grad(set_to_none=set_to_none)
        made.backward(loss)
        counts.append(made.num_forwards)
        assert_equal(gradients(made.model), expected)
    assert counts == [10, 6, 3 + 2, 6, 6]


@pytest.mark.parametrize("mode", ["evaluation", "no gradient", "small batch", "generation"])
def test_other_forward_passes_run_whole(mode: str) -> None:
    _, made, batch = pair("gpt2" if mode == "generation" else "vit")
    if mode == "evaluation":
        made.model(**{key: value[:2] for key, value in batch.items()})
        made.num_forwards = 0
        made.model.eval()
    if mode == "small batch":
        batch = {key: value[:2] for key, value in batch.items()}
    with torch.set_grad_enabled(mode != "no gradient"):
        if mode == "generation":
            made.model.generate(batch["input_ids"], max_new_tokens=1, do_sample=False, pad_token_id=0)
        else:
            made.model(**batch)
    assert made.num_forwards == 1
    assert made.changes.lines == ()
    assert not made.pending.is_any


def test_a_script_that_never_calls_train_trains_in_micro_batches() -> None:
    """from_pretrained() leaves a model in evaluation mode."""
    whole, made, batch = pair("llama")
    whole.eval()
    made.model.eval()
    whole(**batch).loss.backward()
    made.backward(made.model(**batch).loss)
    assert made.num_forwards > 1
    assert_equal(gradients(made.model), gradients(whole))


def test_ranks_that_run_in_step_say_that_evaluation_mode_is_not_split() -> None:
    _, made, batch = pair("llama", max_over_ranks=list)
    made.model.eval()
    made.model(**batch)
    assert made.num_forwards == 1
    assert made.changes.lines == (
        "forward passes in evaluation mode are not split into micro-batches: if the script trains in it, "
        "call model.train() before the first step",
    )
