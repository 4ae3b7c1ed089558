"""Schedulers follow the optimizer that steps, prepared or not."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerators import quiet, settings
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, LRScheduler, ReduceLROnPlateau, SequentialLR

from zerofit.training.step import schedulers


def optimizer() -> torch.optim.AdamW:
    weight = torch.nn.Parameter(torch.ones(2))
    return torch.optim.AdamW([{"params": []}, {"params": [weight], "lr": 0.1}], lr=0.2)


def inverse(own: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(own, lambda step: 1 / (1 + step))


@pytest.mark.parametrize("is_prepared", [True, False])
@pytest.mark.parametrize("kind", ["alone", "chained", "sequential"])
def test_a_group_without_parameters_leaves_its_schedulers_too(kind: str, *, is_prepared: bool) -> None:
    own = optimizer()
    scheduler: LRScheduler = inverse(own)
    if kind == "chained":
        scheduler = ChainedScheduler([scheduler])
    elif kind == "sequential":
        scheduler = SequentialLR(own, [scheduler, inverse(own)], milestones=[9])
    schedulers.drop_empty_groups([torch.nn.Linear(1, 1), own, *([scheduler] if is_prepared else [])])
    own.step()
    scheduler.step()
    assert [group["lr"] for group in own.param_groups] == scheduler.get_last_lr() == [0.05]


def test_a_plateau_with_a_least_rate_a_group_goes_on() -> None:
    own = optimizer()
    scheduler = ReduceLROnPlateau(own, patience=0, min_lr=[0.1, 0.01])
    schedulers.drop_empty_groups([own])
    for loss in (1.0, 2.0, 3.0, 4.0):
        scheduler.step(loss)
    assert [group["lr"] for group in own.param_groups] == [pytest.approx(0.01)]


def test_another_optimizers_schedulers_stay() -> None:
    own, other = optimizer(), optimizer()
    untouched = inverse(other)
    schedulers.drop_empty_groups([own])
    assert len(untouched.base_lrs) == len(other.param_groups) == 2


def test_a_scheduler_that_is_not_prepared_sets_the_rate_of_the_optimizer_that_steps() -> None:
    stale = optimizer()
    scheduler, other = inverse(stale), inverse(optimizer())
    live = torch.optim.SGD(stale.param_groups)
    schedulers.lead_to_live_optimizers([SimpleNamespace(optimizer=SimpleNamespace(optimizer=live))])
    assert scheduler.optimizer is live
    assert other.optimizer is not live


def test_a_momentum_is_cycled_through_deepspeeds_optimizer() -> None:
    """OneCycleLR looks into the defaults of the optimizer that it is given."""

    class Prepared:
        def __init__(self, own: Any) -> None:
            self.optimizer = own

    module: Any = SimpleNamespace(DeepSpeedOptimizer=Prepared)
    schedulers.install(module, settings(), quiet())
    own, other = optimizer(), {"lr": 0.5}
    prepared: Any = Prepared(own)
    assert prepared.defaults["betas"] == (0.9, 0.999)
    prepared.defaults = other
    assert own.defaults is other


def test_a_release_whose_optimizers_have_defaults_keeps_its_own() -> None:
    kind: Any = type("DeepSpeedOptimizer", (), {"defaults": {"lr": 0.25}})
    module: Any = SimpleNamespace(DeepSpeedOptimizer=kind)
    schedulers.install(module, settings(), quiet())
    assert kind.defaults == {"lr": 0.25}


def test_a_scheduler_that_is_led_to_another_optimizer_counts_its_steps() -> None:
    """torch warns of a scheduler that steps before its optimizer, or whose optimizer hides its steps."""
    stale = optimizer()
    scheduler = inverse(stale)
    live = torch.optim.SGD(stale.param_groups)
    schedulers.lead_schedulers(stale, live)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        live.step()
        scheduler.step()
    assert live.param_groups[1]["lr"] == 0.05
