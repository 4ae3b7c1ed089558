"""What bitsandbytes is told of single parameters becomes a group of its own, beside the script's groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerators import quiet
from grouped_optimizers import groups, model
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from zerofit.core.strategy import OptimizerName
from zerofit.training.setup import optimizer_swap
from zerofit.training.setup.deepspeed import state_overrides

EIGHT_BIT = [name for name in OptimizerName if "8bit" in name]


def split(name: OptimizerName) -> tuple[Any, Any, Any]:
    net = model()
    optimizer = torch.optim.AdamW(groups(net), lr=0.01)
    scheduler = LambdaLR(optimizer, [lambda number: 1 / (1 + number), lambda number: 1.0])
    optimizer = optimizer_swap.swap(optimizer, name, modules=net.modules())
    state_overrides.keep_overrides([optimizer], quiet())
    return net, optimizer, scheduler


@pytest.mark.parametrize("name", EIGHT_BIT)
def test_embeddings_keep_weight_decay_and_schedule_in_a_group_of_their_own(name: OptimizerName) -> None:
    net, optimizer, scheduler = split(name)
    held = [group["params"] for group in optimizer.param_groups]
    assert [[id(one) for one in parameters] for parameters in held] == [
        [id(net[1].weight)],
        [id(net[1].bias)],
        [id(net[0].weight)],
    ]
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.005, 0.02, 0.005]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0, 0.1]


@pytest.mark.parametrize("name", EIGHT_BIT)
def test_the_group_tells_the_bits_where_another_tensor_takes_the_parameters_place(
    name: OptimizerName,
) -> None:
    """As DeepSpeed's flat fp32 copy does, which bitsandbytes has been told nothing of."""
    _, optimizer, _ = split(name)
    flat = [torch.nn.Parameter(torch.zeros(8192)) for _ in optimizer.param_groups]
    for group, parameter in zip(optimizer.param_groups, flat, strict=True):
        parameter.grad = torch.ones_like(parameter)
        group["params"] = [parameter]
    optimizer.step()
    kinds = [optimizer.state[parameter]["state1"].dtype for parameter in flat]
    assert kinds == [torch.uint8, torch.uint8, torch.float32]


def test_a_plateau_scheduler_follows_too() -> None:
    net = model()
    optimizer = torch.optim.AdamW(groups(net), lr=0.01)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, min_lr=[0.0, 0.0])
    optimizer = optimizer_swap.swap(optimizer, OptimizerName.ADAMW_8BIT, modules=net.modules())
    state_overrides.keep_overrides([optimizer], quiet())
    for loss in (1.0, 2.0):
        scheduler.step(loss)
    assert [group["lr"] for group in optimizer.param_groups] == [0.005, 0.01, 0.005]


@pytest.mark.parametrize("name", [OptimizerName.ADAMW, OptimizerName.PAGED_ADAMW, OptimizerName.LION])
def test_groups_stay_where_nothing_is_told(name: OptimizerName) -> None:
    _, optimizer, _ = split(name)
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("package", ["apex", "torch_optimizer"])
def test_a_field_of_that_name_in_another_librarys_optimizer_is_left_alone(package: str) -> None:
    kind = type("Managed", (torch.optim.SGD,), {"__module__": f"{package}.optim", "mng": object()})
    optimizer = kind(groups(model()), lr=0.01)
    before = [list(map(id, group["params"])) for group in optimizer.param_groups]
    state_overrides.keep_overrides([optimizer], quiet())
    assert [list(map(id, group["params"])) for group in optimizer.param_groups] == before
