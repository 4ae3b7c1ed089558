"""A prepared schedule goes on at its learning rates where a checkpoint is resumed on other ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerate.scheduler import AcceleratedScheduler
from torch.optim import lr_scheduler
from transformers import get_scheduler

from zerofit.training.changes import Changes
from zerofit.training.saving.resumed_schedules import follow_ranks, own_states

if TYPE_CHECKING:
    from collections.abc import Callable

_STEPS, _SAVED_AFTER = 12, 5
_PER_RANK: dict[str, Callable[[Any, int], Any]] = {
    "warm-up and cosine": lambda own, ranks: get_scheduler("cosine", own, 3 * ranks, _STEPS * ranks),
    "warm-up and linear": lambda own, ranks: get_scheduler("linear", own, 2 * ranks, _STEPS * ranks),
    "own function": lambda own, ranks: lr_scheduler.LambdaLR(own, lambda count: 1 / (1 + count / ranks)),
    "linear": lambda own, ranks: lr_scheduler.LinearLR(own, 0.1, 1.0, total_iters=8 * ranks),
    "steps": lambda own, ranks: lr_scheduler.StepLR(own, step_size=3 * ranks, gamma=0.5),
    "milestones": lambda own, ranks: lr_scheduler.MultiStepLR(own, [2 * ranks, 7 * ranks], gamma=0.3),
    "cosine": lambda own, ranks: lr_scheduler.CosineAnnealingLR(own, T_max=_STEPS * ranks),
    "polynomial": lambda own, ranks: lr_scheduler.PolynomialLR(own, total_iters=_STEPS * ranks, power=2.0),
    "exponential": lambda own, ranks: lr_scheduler.ExponentialLR(own, gamma=0.8 ** (1 / ranks)),
    "constant": lambda own, ranks: get_scheduler("constant", own),
}
"""Schedules whose length a script multiplies by the ranks, as accelerate's documentation asks."""


class _Training:
    """An optimizer of two groups and its prepared schedule, on so many ranks."""

    def __init__(self, make: Callable[[Any, int], Any], ranks: int) -> None:
        groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": rate} for rate in (0.02, 0.005)]
        self.optimizer = torch.optim.SGD(groups, lr=0.02)
        self._ranks = ranks
        self.wrapper = AcceleratedScheduler(make(self.optimizer, ranks), self.optimizer)

    def train(self, steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            rates += [group["lr"] for group in self.optimizer.param_groups]
            self.optimizer.step()
            for _ in range(self._ranks):
                self.wrapper.scheduler.step()
        return rates


def _resumed(make: Callable[[Any, int], Any], saved: int, now: int, changes: Changes) -> _Training:
    before, after = _Training(make, saved), _Training(make, now)
    before.train(_SAVED_AFTER)
    schedulers = own_states([after.wrapper])
    after.optimizer.load_state_dict(before.optimizer.state_dict())
    after.wrapper.load_state_dict(before.wrapper.state_dict())
    follow_ranks(schedulers, saved=saved, now=now, changes=changes)
    return after


@pytest.mark.parametrize(("saved", "now"), [(2, 1), (1, 2), (2, 4), (4, 2), (3, 2), (2, 2)])
@pytest.mark.parametrize("name", _PER_RANK)
def test_a_schedule_goes_on_as_in_one_process(name: str, saved: int, now: int) -> None:
    make, changes = _PER_RANK[name], Changes(announce=False)
    alone = _Training(make, 1).train(_STEPS)
    resumed = _resumed(make, saved, now, changes).train(_STEPS - _SAVED_AFTER)
    assert resumed == pytest.approx(alone[2 * _SAVED_AFTER :], rel=1e-6, abs=1e-12)
    assert changes.lines == ()


@pytest.mark.parametrize(
    "make",
    [
        lambda own: lr_scheduler.LambdaLR(own, lambda count: 1 / (1 + count / 10)),
        lambda own: lr_scheduler.CosineAnnealingWarmRestarts(own, T_0=4),
        lambda own: lr_scheduler.CosineAnnealingLR(own, T_max=100),
        lambda own: lr_scheduler.StepLR(own, step_size=3, gamma=0.5),
        lambda own: lr_scheduler.OneCycleLR(own, max_lr=0.1, total_steps=50),
    ],
)
def test_a_schedule_that_is_alike_on_any_ranks_goes_on_as_saved_and_that_is_told(
    make: Callable[[Any], Any],
) -> None:
    changes = Changes(announce=False)
    resumed = _resumed(lambda own, _: make(own), 2, 1, changes)
    (line,) = changes.lines
    assert line.endswith(
        "goes on as it was saved, and advances by 1 in a step, as accelerate steps it, where it advanced by 2"
    )
    assert resumed.wrapper.scheduler.last_epoch == 2 * _SAVED_AFTER


def test_schedules_that_count_no_ranks_stay_as_they_were_saved() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = lr_scheduler.StepLR(optimizer, step_size=2)
    for wrapper in (
        AcceleratedScheduler(schedule, optimizer, split_batches=True),
        AcceleratedScheduler(schedule, optimizer, step_with_optimizer=False),
    ):
        assert own_states([wrapper]) == []
