"""Which models are refused: those that mix samples, keep a state, or fail on a part of the samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusals import refusal
from split_models import assert_equal, gradients, split

from zerofit.models.pieces import Inputs
from zerofit.training.batch.micro_batches.separability import halves_of


@pytest.mark.parametrize(
    ("size", "at_most", "half"),
    [(2, 8, 1), (3, 8, 1), (4, 8, 2), (9, 8, 4), (16, 8, 4), (16, 2, 2), (16, 4, 3)],
)
def test_a_check_compares_two_halves_of_different_samples(size: int, at_most: int, half: int) -> None:
    rows = torch.arange(size)
    inputs = Inputs(args=(rows,), kwargs={})
    halves = halves_of(inputs, size=size, at_most=at_most, can_split=True, model=torch.nn.Linear(1, 1))
    ((first,), (second,), (whole,)) = (part.args for part in (halves.first, halves.second, halves.whole))
    assert (len(first), len(second), halves.size, halves.num_samples) == (half, half, half, 2 * half)
    assert whole.tolist() == [*first.tolist(), *second.tolist()]
    assert len(set(whole.tolist())) == 2 * half


def test_batch_normalization_is_refused_unless_it_is_frozen() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4))
    made = split(model)
    assert refusal(model, torch.randn(5, 3)).found == "1 (BatchNorm1d) and 1 more"
    model[1].eval()
    model[2].eval()
    made.backward(model(torch.randn(5, 3)).sum())


def test_a_hook_of_the_script_on_a_gradient_may_look_and_not_change_it() -> None:
    model = torch.nn.Linear(3, 1)
    seen: list[Any] = []
    model.weight.register_hook(seen.append)
    made = split(model)
    made.backward(model(torch.randn(5, 3)).sum())
    assert seen
    model = torch.nn.Linear(3, 1)
    model.bias.register_hook(lambda gradient: gradient.clamp(max=1.0))
    made = split(model)
    found = refusal(lambda: made.backward(model(torch.randn(5, 3)).sum())).found
    assert found == "a hook on the gradient of bias, which changes it"


class _Keeping(torch.nn.Module):
    """Does something to its buffers in each training pass.

    Args:
        act: takes the module and its output.
    """

    def __init__(self, act: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("average", torch.zeros(4))
        self.act = act

    def forward(self, x: Any) -> Any:
        y = self.linear(x)
        if self.training:
            self.act(self, y.detach())
        return y


def _count_in_place(model: Any, _: Any) -> None:
    model.count += 1


def _count_anew(model: Any, _: Any) -> None:
    model.count = model.count + 1


def _average(model: Any, y: Any) -> None:
    model.average.mul_(0.9).add_(y.mean(0), alpha=0.1)
    model.count += 1


def _fill_once(model: Any, y: Any) -> None:
    if not model.average.any():
        model.average.add_(torch.arange(4.0) + 1)


def _same_again(model: Any, _: Any) -> None:
    model.average = torch.arange(4.0)  # as transformers' rotary embeddings do for longer texts


def _instance_norm() -> Any:
    return torch.nn.Sequential(
        torch.nn.Unflatten(1, (2, 2)), torch.nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
    )


_CHANGING = {
    "counted in place": (lambda: _Keeping(_count_in_place), "count"),
    "counted anew": (lambda: _Keeping(_count_anew), "count"),
    "moving average": (lambda: _Keeping(_average), "count and 1 more"),
    "instance norm": (_instance_norm, "1.running_mean and 1 more"),
    "spectral norm": (
        lambda: torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(4, 4)),
        "parametrizations.weight.0._u and 1 more",
    ),
}


@pytest.mark.parametrize(("make", "named"), _CHANGING.values(), ids=_CHANGING)
def test_buffers_that_each_training_pass_changes_are_refused(make: Callable[[], Any], named: str) -> None:
    model = make()
    split(model)
    error = refusal(model, torch.randn(6, 4))
    assert error.rule == "forward-not-separable"
    assert error.found == f"the buffer {named} changes in each forward pass"


def test_two_micro_batches_are_enough_to_see_that_buffers_change() -> None:
    model = _Keeping(_count_in_place)
    split(model)
    assert refusal(model, torch.randn(4, 4)).rule == "forward-not-separable"


def _add_one(model: Any, _: Any) -> None:
    model.num_passes = getattr(model, "num_passes", 0) + 1
    if model.num_passes == 2:
        model.register_buffer("late", torch.ones(4), persistent=False)


@pytest.mark.parametrize("act", [_fill_once, _same_again, _add_one])
def test_buffers_that_stay_as_they_are_are_not(act: Any) -> None:
    model = _Keeping(act)
    made = split(model)
    for _ in range(3):
        made.backward(model(torch.randn(6, 4)).sum())


class _Merging(torch.nn.Module):
    """As loralib's layers: evaluation mode merges the adapter into the weight, training mode takes it out."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(3, 2, bias=False).requires_grad_(False)
        self.adapter = torch.nn.Parameter(torch.ones(2, 3))
        self.is_merged = False

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        if mode == self.is_merged:
            self.base.weight.data += self.adapter.data * (-1 if mode else 1)
            self.is_merged = not mode
        return self

    def forward(self, x: Any) -> Any:
        return self.base(x) if self.is_merged else self.base(x) + x @ self.adapter.T


def test_a_model_whose_evaluation_mode_does_more_stays_as_it_was() -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(_Merging(), torch.nn.Dropout(0.0)), torch.randn(6, 3)
    model[1].eval()  # frozen by the script
    weight = model[0].base.weight.clone()
    model(x).pow(2).sum().backward()
    expected = gradients(model)
    made = split(model)
    made.backward(model(x).pow(2).sum())
    assert_equal(gradients(model), expected)
    assert torch.equal(model[0].base.weight, weight)
    assert [one.training for one in model] == [True, False]


class _Weighted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 6)

    def forward(self, x: Any, labels: Any, weight: Any) -> Any:
        return {"loss": torch.nn.functional.cross_entropy(self.linear(x), labels, weight=weight)}


def test_a_model_that_fails_on_a_part_of_the_samples_is_refused_with_its_own_words() -> None:
    model = _Weighted()
    split(model)
    error = refusal(model, torch.randn(6, 3), torch.arange(6), weight=torch.ones(6))
    assert error.rule == "forward-not-separable"
    assert error.why == "the model fails on some of the batch's samples"
    assert error.found.startswith("RuntimeError: weight tensor should be defined")
    assert isinstance(error.__cause__, RuntimeError)


class _InBatch(torch.nn.Module):
    """As FlagEmbedding's embedders: the loss compares all samples, and only training computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)

    def forward(self, queries: Any, passages: Any) -> Any:
        found = self.linear(queries)
        if not self.training:
            return {"found": found}
        loss = torch.nn.functional.cross_entropy(found @ self.linear(passages).T, torch.arange(len(found)))
        return {"loss": loss, "found": found}


def test_a_loss_that_training_alone_computes_is_refused() -> None:
    model = _InBatch().train()
    split(model)
    error = refusal(model, torch.randn(6, 3), torch.randn(6, 3))
    assert error.rule == "forward-not-separable"
    assert error.found == "output loss, which the model only returns in training"
