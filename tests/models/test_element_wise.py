"""Which optimizers step each element by itself, as tried on small copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from zerofit.models.element_wise import try_element_wise

if TYPE_CHECKING:
    from collections.abc import Callable

_SHAPES = ((4, 6), (6,), (6, 4))


class _ByNorm(torch.optim.Optimizer):
    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                one.sub_(group["lr"] * one.grad / one.grad.norm())


class _WithMatrices(_ByNorm):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                one.sub_(one.grad @ torch.ones(one.shape[1], 1) if one.dim() == 2 else one.grad)


class _Wrapping(torch.optim.Optimizer):
    """Steps another optimizer, whose groups it shares."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.inner = torch.optim.AdamW(self.param_groups, lr=0.1)
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class _NeedsClosure(_ByNorm):
    def step(self, closure: Any = None) -> None:
        closure()


def _parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(shape)) for shape in _SHAPES]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda own: torch.optim.AdamW(own, lr=0.1), True),
        (lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9, nesterov=True), True),
        (lambda own: torch.optim.Adagrad(own), True),
        (lambda own: torch.optim.RMSprop(own, centered=True), True),
        (lambda own: torch.optim.Rprop(own), True),
        (lambda own: torch.optim.ASGD(own), True),
        (lambda own: torch.optim.AdamW([{"params": own[:1]}, {"params": own[1:], "lr": 0.5}]), True),
        (lambda own: torch.optim.Adafactor(own), False),
        (lambda own: torch.optim.Muon(own[::2]), False),
        (_ByNorm, False),
        (_WithMatrices, False),
        (_Wrapping, True),
        (_NeedsClosure, None),
    ],
)
def test_an_optimizer_steps_elements_or_tensors(make: Callable[[Any], Any], expected: bool | None) -> None:
    assert try_element_wise(make(_parameters())).is_kept is expected


def test_the_optimizer_is_left_as_it_is() -> None:
    parameters = _parameters()
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    calls: list[object] = []
    handle = register_optimizer_step_post_hook(lambda *args: calls.append(args))
    optimizer.register_step_post_hook(lambda *args: calls.append(args))
    before = torch.random.get_rng_state()
    assert try_element_wise(optimizer).is_kept
    handle.remove()
    assert calls == []
    assert schedule.last_epoch == 0
    assert not optimizer.state
    assert all(bool((one == 1).all()) for one in parameters)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_what_differs_is_said() -> None:
    tried = try_element_wise(_ByNorm(_parameters()))
    assert tried.name.endswith("'s _ByNorm")
    assert tried.found.startswith("three steps on small tensors and on their concatenation end ")


class _WithModes(_ByNorm):
    """As schedule-free optimizers are."""

    def train(self) -> None:
        pass

    def eval(self) -> None:
        pass


def test_an_optimizer_that_exchanges_the_weights_is_none() -> None:
    assert try_element_wise(_WithModes(_parameters())).found == "its train() and eval() exchange the weights"
