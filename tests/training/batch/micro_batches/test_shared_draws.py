"""A forward pass that draws random numbers runs in parts, with the numbers that the whole batch draws."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from split_models import assert_equal, gradients, split

from zerofit.core.errors import UserError

_Draw = Callable[[torch.Tensor], torch.Tensor]
_DRAWS: dict[str, _Draw] = {
    "like": torch.randn_like,
    "shape": lambda x: torch.rand(x.shape[0], 1),
    "sizes": lambda x: torch.randn((x.shape[0], 3)),
    "whole numbers": lambda x: torch.randint(0, 9, (x.shape[0], 1)),
    "size by name": lambda x: torch.randint(0, 9, size=(x.shape[0], 3)) + torch.rand(size=(x.shape[0], 1)),
    "in place": lambda x: torch.empty_like(x).uniform_(1, 2),
    "one for all samples": lambda x: torch.rand(()) + torch.randn(3),
}


class _Noised(torch.nn.Module):
    """A diffusion loss: it learns to tell the noise that it has added itself."""

    def __init__(self, draw: _Draw, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(dropout), torch.nn.Tanh())
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, noise = torch.rand(x.shape[0], 1), self.draw(x)
        return ((self.net(x * first + noise) - noise) ** 2).mean(1)


def _trained(model: Any, backward: Callable[[Any], None], num_steps: int = 5) -> list[Any]:
    torch.manual_seed(3)
    found: list[Any] = []
    for _ in range(num_steps):
        loss = model(torch.arange(15.0).reshape(5, 3)).mean()
        backward(loss)
        found.append((loss.item(), gradients(model)))
    return [*found, torch.rand(3)]


@pytest.mark.parametrize("draw", _DRAWS)
def test_parts_draw_what_the_whole_batch_draws(draw: str) -> None:
    torch.manual_seed(0)
    model = _Noised(_DRAWS[draw]).train()
    *expected, last = _trained(model, torch.Tensor.backward)
    made = split(model)
    *found, then = _trained(model, made.backward)
    assert made.num_forwards > len(found)
    for (loss, one), (whole, other) in zip(found, expected, strict=True):
        assert loss == pytest.approx(whole, rel=1e-5)
        assert_equal(one, other)
    assert torch.equal(then, last)


def test_parts_run_again_with_the_dropout_of_their_first_run() -> None:
    model = _Noised(torch.randn_like, dropout=0.5).train()
    copied = copy.deepcopy(model)
    made = split(model)
    states, found = [], []
    for _ in range(4):  # the last go backward early, in their first run
        states.append(torch.get_rng_state())
        made.backward(model(torch.ones(5, 3)).mean())
        found.append(gradients(model))
    again = split(copied)
    for state, one in zip(states, found, strict=True):
        torch.set_rng_state(state)
        again.backward(again.model(torch.ones(5, 3)).mean())
        assert_equal(gradients(again.model), one)
        again.split_model.guess.record(None)  # so that all of them run twice


def test_draws_of_a_generator_of_its_own_are_not_repeated() -> None:
    generator = torch.Generator().manual_seed(5)
    model = _Noised(lambda x: torch.randn(x.shape, generator=generator)).train()
    made = split(model)
    made.backward(model(torch.ones(5, 3)).mean())
    after = torch.randn(2, generator=generator)
    generator.manual_seed(5)
    torch.randn(4, 3, generator=generator)  # of the check
    torch.randn(5, 3, generator=generator)
    assert torch.equal(torch.randn(2, generator=generator), after)


@pytest.mark.parametrize(
    ("draw", "found"),
    [
        (lambda x: torch.randn(2 * x.shape[0], 3)[::2], "differs by"),
        (lambda x: torch.randn(x.shape[0] + 1, 3)[1:], "differs by"),
        (torch.bernoulli, "differs by"),
    ],
)
def test_what_is_no_row_for_each_sample_is_refused(draw: _Draw, found: str) -> None:
    model = _Noised(draw).train()
    split(model)
    torch.manual_seed(0)
    with pytest.raises(UserError) as caught:
        model(torch.rand(5, 3)).mean()
    assert found in caught.value.found


def test_draws_in_a_layer_that_is_recomputed_are_refused() -> None:
    from torch.utils.checkpoint import checkpoint

    class Recomputed(_Noised):
        def forward(self, x: torch.Tensor) -> Any:
            again = super().forward
            return checkpoint(again, x, use_reentrant=False) if self.training else again(x)

    model = Recomputed(torch.randn_like).train()
    split(model)
    with pytest.raises(UserError) as caught:
        model(torch.rand(5, 3))
    assert caught.value.found == "rand() in a layer that is recomputed"


def test_a_compiled_model_that_draws_is_refused() -> None:
    model = torch.compile(_Noised(torch.randn_like), backend="eager").train()
    split(model)
    with pytest.raises(UserError) as caught:
        model(torch.rand(5, 3))
    assert caught.value.found == "a compiled model that draws random numbers"
