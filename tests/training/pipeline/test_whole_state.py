"""Optimizers of a pipeline on one rank: what they keep, and what is saved of them."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from accelerators import quiet

from zerofit.core.errors import UserError
from zerofit.core.upstream.torch import count_collectives
from zerofit.training.pipeline.groups import Groups
from zerofit.training.pipeline.pipeline import Pipeline
from zerofit.training.pipeline.whole_state import WholeStates, name_parameters

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def alone() -> Iterator[Groups]:
    """The groups of the only rank of a pipeline."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    world: Any = dist.group.WORLD
    yield Groups(pipeline=world, host=world, replicas=world, ends=world, place=0, num_ranks=1)
    dist.destroy_process_group()


def _model() -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    name_parameters(model)
    return model


def _states(model: Any, groups: Groups | None = None) -> WholeStates:
    pipeline: Any = SimpleNamespace(model=model, groups=groups)
    return WholeStates(pipeline, limit_s=0)


def test_an_optimizer_keeps_the_parameters_of_its_ranks_stages_in_their_groups() -> None:
    model = _model()
    first, last = model
    optimizer = torch.optim.SGD(
        [
            {"params": [first.weight, last.weight], "lr": 0.5},
            {"params": [first.bias, last.bias], "lr": 0.25},
        ]
    )
    stages = _states(first)
    stages.cut_optimizer(optimizer)
    stages.cut_optimizer(optimizer)  # as a second prepare() does
    kept = [(group["params"], group["lr"]) for group in optimizer.param_groups]
    assert kept == [([first.weight], 0.5), ([first.bias], 0.25)]


def _trained(model: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.5, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


def _saved(optimizer: torch.optim.Optimizer, stages: WholeStates) -> dict[str, Any]:
    with stages.gathered("save_state", optimizers=True):
        saved: dict[str, Any] = optimizer.state_dict()
    return saved


def _assert_equal(saved: dict[str, Any], plain: dict[str, Any]) -> None:
    assert saved["param_groups"] == plain["param_groups"]
    assert saved["state"].keys() == plain["state"].keys()
    for number, state in plain["state"].items():
        assert torch.equal(saved["state"][number]["momentum_buffer"], state["momentum_buffer"])


def test_an_optimizer_is_saved_with_all_groups_also_those_that_are_added_later(alone: Groups) -> None:
    model = _model()
    optimizer = _trained(model)
    stages = _states(model, alone)
    stages.cut_optimizer(optimizer)
    stages.wrap_optimizers()
    _assert_equal(_saved(optimizer, stages), torch.optim.SGD.state_dict(optimizer))
    optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.25})
    optimizer.step()
    plain = deepcopy(torch.optim.SGD.state_dict(optimizer))
    assert [group["params"] for group in plain["param_groups"]] == [[0, 1], [2, 3]]
    saved = _saved(optimizer, stages)
    _assert_equal(saved, plain)
    for state in optimizer.state.values():
        state["momentum_buffer"] = torch.zeros_like(state["momentum_buffer"])
    optimizer.load_state_dict(saved)
    _assert_equal(_saved(optimizer, stages), plain)


def test_an_added_group_keeps_the_parameters_of_its_ranks_stages() -> None:
    model = _model()
    first, last = model
    optimizer = torch.optim.SGD([first.weight, last.weight], lr=0.5)
    stages = _states(first)
    stages.cut_optimizer(optimizer)
    stages.wrap_optimizers()
    optimizer.add_param_group({"params": [first.bias, last.bias]})
    assert [group["params"] for group in optimizer.param_groups] == [[first.weight], [first.bias]]
    refused: tuple[tuple[Any, type[Exception], str], ...] = (
        (last.weight, ValueError, "some parameters appear in more than one parameter group"),
        (first.bias, ValueError, "some parameters appear in more than one parameter group"),
        ([torch.nn.Parameter(torch.ones(1))], UserError, "may only hold parameters of its model"),
    )
    for added, kind, message in refused:
        with pytest.raises(kind, match=message):
            optimizer.add_param_group({"params": added})
        assert [group["params"] for group in optimizer.param_groups] == [[first.weight], [first.bias]]


def test_a_state_of_other_groups_is_refused_as_torch_refuses_it(alone: Groups) -> None:
    model = _model()
    optimizer = _trained(model)
    stages = _states(model, alone)
    stages.cut_optimizer(optimizer)
    stages.wrap_optimizers()
    saved = _saved(optimizer, stages)
    one_more = {**saved, "param_groups": [*saved["param_groups"], {"params": [2]}]}
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(one_more)
    shorter = {**saved, "param_groups": [{**saved["param_groups"][0], "params": [0]}]}
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        optimizer.load_state_dict(shorter)


def test_a_pipeline_without_replicas_exchanges_no_gradients(alone: Groups) -> None:
    model = _model()
    pipeline = Pipeline(
        model=model,
        num_stages=1,
        stages={0: []},
        forward=model.forward,
        groups=alone,
        changes=quiet(),
        most_rows=None,
        tied=None,
    )
    weight = model[0].weight
    dist.barrier()
    before = count_collectives()
    assert before > 0
    pipeline.accumulate_gradients([(weight, torch.ones(2, 2))])
    pipeline.accumulate_gradients([(weight, torch.ones(2, 2))])
    assert torch.equal(weight.grad, torch.full((2, 2), 2.0))
    assert count_collectives() == before
