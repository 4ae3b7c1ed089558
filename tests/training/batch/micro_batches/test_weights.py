"""How the losses of micro-batches are weighted, whatever labels are left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from refusals import refusal
from split_models import assert_equal, gradients, split

from zerofit.models.pieces import Inputs
from zerofit.training.batch.micro_batches.weights import weightings


class _Words(torch.nn.Module):
    """Predicts each word's label; the loss is left to be chosen."""

    def __init__(self, loss_of: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.states = torch.nn.Embedding(7, 4)
        self.head = torch.nn.Linear(4, 5)
        self.loss_of = loss_of

    def forward(self, input_ids: Any, labels: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        logits = self.head(self.states(input_ids))
        return {"loss": self.loss_of(logits, labels, **kwargs), "logits": logits}


def _mean(logits: Any, labels: Any, ignore_index: int = -100) -> Any:
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=ignore_index
    )


def _mean_of_samples(logits: Any, labels: Any) -> Any:
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return (losses.sum(1) / (labels != -100).sum(1).clamp_min(1)).mean()


def _total(logits: Any, labels: Any, num_items_in_batch: Any = 1) -> Any:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (
        num_items_in_batch
    )


_LOSSES: dict[str, Callable[..., Any]] = {
    "mean of tokens": _mean,
    "mean of shifted tokens": lambda logits, labels: _mean(logits[:, :-1], labels[:, 1:]),
    "mean of samples": _mean_of_samples,
    "sum": _total,
    "shifted and ignoring -1": lambda logits, labels: _mean(
        logits[:, :-1], labels[:, 1:].masked_fill(labels[:, 1:] == -100, -1), -1
    ),
}


@settings(max_examples=40, deadline=None)
@given(data=st.data(), kind=st.sampled_from(sorted(_LOSSES)), size=st.integers(2, 9), most=st.integers(1, 9))
def test_any_batch_size_micro_batch_and_labels(data: Any, kind: str, size: int, most: int) -> None:
    kept = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size).filter(any))
    # Samples with as many labels each tell no mean of samples from one of tokens: later batches do.
    assume(kind != "mean of samples" or len({one for one in kept if one}) > 1 or len(set(kept)) == 1)
    torch.manual_seed(data.draw(st.integers(0, 99)))
    labels = torch.randint(0, 5, (size, 4))
    for row, count in enumerate(kept):
        labels[row, : 4 - count] = -100
    batch = {"input_ids": torch.randint(0, 7, (size, 4)), "labels": labels}
    model = _Words(_LOSSES[kind])
    whole = model(**batch)["loss"]
    whole.backward()
    expected = torch.cat([one.grad.flatten() for one in model.parameters()])
    made = split(model, most)
    for _ in range(3):
        model.zero_grad()
        loss = model(**batch)["loss"]
        assert loss.item() == pytest.approx(whole.item(), rel=1e-5)
        made.backward(loss)
        found = torch.cat([one.grad.flatten() for one in model.parameters()])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


def test_a_loss_that_is_0_in_the_check_is_looked_at_as_it_is() -> None:
    """One labelled token whose label is the model's own guess."""
    model = _Words(_mean_of_samples)
    batch = _batch((6, 6, 6, 5))
    with torch.no_grad():
        batch["labels"][3, 5] = model(**batch)["logits"][3, 5].argmax()
    whole = model(**batch)["loss"].item()
    split(model, 1)
    assert model(**batch)["loss"].item() == pytest.approx(whole, rel=1e-5)


def _batch(num_ignored: tuple[int, ...]) -> dict[str, Any]:
    labels = torch.randint(0, 5, (len(num_ignored), 6))
    for row, count in enumerate(num_ignored):
        labels[row, :count] = -100
    return {"input_ids": torch.randint(0, 7, labels.shape), "labels": labels}


def test_a_weighting_that_the_first_batch_cannot_tell_is_checked_when_one_can() -> None:
    torch.manual_seed(0)
    model = _Words(_mean_of_samples)
    made = split(model)
    alike, unlike = _batch((0, 0, 0, 0)), _batch((1, 1, 4, 5))
    whole = _Words(_mean_of_samples)
    whole.load_state_dict(model.state_dict())
    for batch, num_forwards in ((alike, 4 + 4), (alike, 4), (unlike, 4 + 2), (unlike, 2)):
        made.num_forwards = 0
        made.backward(model(**batch)["loss"])
        assert made.num_forwards == num_forwards
        whole(**batch)["loss"].backward()
        assert_equal(gradients(model), gradients(whole))


@pytest.mark.parametrize(
    ("loss_type", "more", "most_likely"),
    [
        (None, {}, ["labels other than -100", "labels other than -100, shifted"]),
        ("ForCausalLM", {}, ["labels other than -100, shifted", "labels other than -100"]),
        ("ForCausalLM", {"num_items_in_batch": 5}, ["sum", "labels other than -100, shifted"]),
    ],
)
def test_the_most_likely_weighting_comes_first(
    loss_type: str | None, more: dict[str, int], most_likely: list[str]
) -> None:
    model = _Words(_mean)
    model.loss_type = loss_type
    batch = Inputs(args=(), kwargs={**_batch((0, 3)), **more})
    assert list(weightings([(batch, 2)], model))[:2] == most_likely


def test_batches_that_tell_no_weighting_are_checked_four_times() -> None:
    model = _Words(_mean)
    made = split(model)
    counts = []
    for _ in range(6):
        made.num_forwards = 0
        model(**_batch((6, 6, 6, 6)))
        counts.append(made.num_forwards)
    without_check = counts[-1]
    assert [count > without_check for count in counts] == [True] * 4 + [False] * 2


@pytest.mark.parametrize("honours", [True, False])
def test_num_items_in_batch(honours: bool) -> None:
    def loss_of(logits: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return _total(logits, labels, num_items_in_batch) if honours else _mean(logits, labels)

    torch.manual_seed(0)
    model, batch = _Words(loss_of), _batch((0, 3, 5, 1, 2))
    batch["num_items_in_batch"] = torch.tensor(40)
    model(**batch)["loss"].backward()
    whole = gradients(model)
    made = split(model)
    for _ in range(3):
        made.backward(model(**batch)["loss"])
        assert_equal(gradients(model), whole)


def test_a_micro_batch_without_labels_counts_nothing() -> None:
    torch.manual_seed(0)
    model, batch = _Words(_mean), _batch((0, 0, 1, 2, 6, 6))
    model(**batch)["loss"].backward()
    expected = gradients(model)
    made = split(model)
    for _ in range(4):
        made.backward(model(**batch)["loss"])
        assert_equal(gradients(model), expected)


def test_a_batch_without_labels_has_no_loss_as_without_splitting() -> None:
    model = _Words(_mean)
    made = split(model)
    made.backward(model(**_batch((0, 0, 1, 2)))["loss"])
    assert model(**_batch((6, 6, 6, 6)))["loss"].isnan()


def test_a_loss_that_is_no_mean_is_refused() -> None:
    model = _Words(lambda logits, labels: logits.flatten(1).std(0).mean())
    split(model)
    error = refusal(model, **_batch((0, 1, 2, 3)))
    assert error.rule == "forward-not-separable"
    assert error.found.startswith("output loss is ")
