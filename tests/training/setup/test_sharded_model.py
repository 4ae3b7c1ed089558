"""What FSDP2's hook lets a script do: its optimizers before sharding, and its modules after it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerators import quiet, settings, wrap_all
from refusals import refusal
from torch import nn

from zerofit.models.element_wise import ElementWise
from zerofit.training.setup import sharded_model

pytestmark = pytest.mark.usefixtures("no_earlier_optimizers")


class _Accelerator:
    """Returns what it is given: models stay whole."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.state = SimpleNamespace(fsdp_plugin=SimpleNamespace(mixed_precision_policy=None))

    def prepare(self, *objects: Any) -> Any:
        return list(objects)


def _prepare(monkeypatch: pytest.MonkeyPatch, *, is_checked: bool) -> tuple[Any, ...]:
    """Prepare a model with an optimizer that can't step shards."""
    tried = ElementWise(is_kept=False, name="mine", found="it reads memory")
    monkeypatch.setattr(sharded_model, "try_sharded", lambda optimizer, device: tried)
    monkeypatch.setattr(sharded_model, "_refuse_registrations", lambda: None)
    wanted = settings(uses_fsdp2=True)
    wanted = replace(wanted, plan=replace(wanted.plan, is_checked=is_checked))
    owner = type("Accelerator", (_Accelerator,), {})
    wrap_all(owner, sharded_model.wrappers(owner, wanted, quiet()))
    model = nn.Linear(2, 2)
    return owner().prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))  # type: ignore[attr-defined, no-any-return]


def test_an_optimizer_that_steps_no_shards_is_refused_unless_the_plan_checks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert refusal(_prepare, monkeypatch, is_checked=True).rule == "optimizer-steps-no-shards"
    assert len(_prepare(monkeypatch, is_checked=False)) == 2


@pytest.fixture
def sharded() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    sharded_model._sharded.update(model.modules())
    return model


@pytest.mark.parametrize("part", ["removed", "moved", "frozen"])
def test_a_sharded_model_may_lose_a_part_or_move_it_or_get_a_frozen_one(part: str, sharded: Any) -> None:
    parts = {"removed": None, "moved": sharded[1], "frozen": nn.Linear(2, 2).requires_grad_(False)}
    sharded_model._refuse_module(sharded, "0", parts[part])


def test_a_part_that_trains_is_refused_in_a_sharded_model_alone(sharded: Any) -> None:
    refused = refusal(sharded_model._refuse_module, sharded, "head", nn.Linear(2, 2))
    assert (refused.rule, refused.found) == (
        "parameter-replaced-under-fsdp2",
        "Sequential.head is set after accelerator.prepare()",
    )
    sharded_model._refuse_module(nn.Sequential(), "head", nn.Linear(2, 2))


@pytest.mark.parametrize("trains", [None, False, True])
def test_a_sharded_model_gets_no_parameter_that_trains(trains: bool | None, sharded: Any) -> None:
    parameter = None if trains is None else nn.Parameter(torch.ones(2), requires_grad=trains)
    sharded_model._refuse_parameter(nn.Linear(2, 2), "bias", parameter)  # of a model that is not sharded
    if trains:
        refused = refusal(sharded_model._refuse_parameter, sharded[0], "bias", parameter)
        assert refused.found == "Linear.bias is set after accelerator.prepare()"
    else:
        sharded_model._refuse_parameter(sharded[0], "bias", parameter)
