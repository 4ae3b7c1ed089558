"""Tests whether an optimizer steps shards as it steps whole tensors: of ZeRO's flat buffers, of FSDP2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zerofit.core.upstream.torch import without_step_hooks
from zerofit.models.optimizer_copy import copy_on

_NUM_STEPS = 3
_MAX_TENSORS = 4
"""Tensors of each parameter group that are tried."""
_TOLERANCE = 1e-4
"""Of the longest way of an element: vector lanes sum and round in another order. ASSUMPTION: what depends
on other elements differs by far more; a step by the tensor's norm differs by some 0.5."""
_KNOWN = ("bitsandbytes", "deepspeed", "torchao")
"""Packages that are not tried. DeepSpeed's optimizers are made for flat buffers. States of 8 and 4 bits
share a scale in blocks of 64 to 2,048 elements: in a flat buffer a block holds other elements than in a
tensor, and rounds them with the same error (measured after 6 steps: at most 5e-2 of the way)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementWise:
    """Whether an optimizer steps each element by itself."""

    is_kept: bool | None
    """None if it can't be tried."""
    name: str
    """The optimizer's package and class: "peft's LoraFAOptimizer"."""
    found: str = ""
    """How it differs, or why it can't be tried."""


def try_element_wise(optimizer: Any) -> ElementWise:
    """Step small copies of an optimizer on tensors and on their concatenation, and compare.

    Args:
        optimizer: a torch.optim.Optimizer with the script's settings; it is not changed.
    """
    import torch

    with torch.random.fork_rng(devices=()), torch.device("cpu"), torch.enable_grad():
        return _tried(optimizer)


def _tried(optimizer: Any) -> ElementWise:
    import torch

    package = type(optimizer).__module__.partition(".")[0]
    name = f"{package}'s {type(optimizer).__name__}"
    if package in _KNOWN:
        return ElementWise(is_kept=True, name=name)
    if all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval")):
        # As schedule-free ones have: they move between two sets of weights, of which ZeRO knows one.
        return ElementWise(is_kept=False, name=name, found="its train() and eval() exchange the weights")
    generator = torch.Generator().manual_seed(0)
    draws = [
        [[torch.randn(shape, generator=generator) for shape in group] for group in _small_shapes(optimizer)]
        for _ in range(_NUM_STEPS + 1)
    ]
    try:
        apart = _stepped(optimizer, draws)
    except Exception as error:  # any: it is the script's code
        found = f"on small tensors it fails ({type(error).__name__}: {error})"
        return ElementWise(is_kept=None, name=name, found=found)
    flat = [[[torch.cat([tensor.flatten() for tensor in group])] for group in draw] for draw in draws]
    try:
        together = _stepped(optimizer, flat)
    except Exception as error:  # any: it is the script's code
        return ElementWise(is_kept=False, name=name, found=f"{type(error).__name__}: {error}")
    return _compared(name, apart, together, draws[0], "and on their concatenation")


def _compared(
    name: str, expected: list[Any], seen: list[Any], start: list[list[Any]], words: str
) -> ElementWise:
    """Return whether both ways of stepping end alike, measured by the way from the start."""
    way = max(float((end - begin).abs().max()) for end, begin in zip(expected, _joined(start), strict=True))
    distance = max(float((alone - two).abs().max()) for alone, two in zip(expected, seen, strict=True))
    if distance <= _TOLERANCE * way:
        return ElementWise(is_kept=True, name=name)
    share = distance / way if way else float("inf")
    found = f"three steps on small tensors {words} end {share:.1g} of the way apart"
    return ElementWise(is_kept=False, name=name, found=found)


def try_sharded(optimizer: Any, device: Any) -> ElementWise:
    """Step small copies of an optimizer on whole tensors and on sharded ones, and compare; a collective.

    Args:
        optimizer: a torch.optim.Optimizer with the script's settings; it is not changed.
        device: of this rank.
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    name = f"{type(optimizer).__module__.partition('.')[0]}'s {type(optimizer).__name__}"
    generator = torch.Generator().manual_seed(0)
    draws = [
        [[torch.randn(shape, generator=generator).to(device) for shape in group] for group in shapes]
        for shapes in [_small_shapes(optimizer)] * (_NUM_STEPS + 1)
    ]

    def cut(tensor: Any) -> Any:
        return distribute_tensor(tensor, mesh, [Shard(0)])

    devices = () if device.type == "cpu" else (device,)
    with torch.random.fork_rng(devices=devices, device_type=device.type), torch.enable_grad():
        try:
            whole = _stepped(optimizer, draws)
        except Exception as error:  # any: it is the script's code
            found = f"on small tensors it fails ({type(error).__name__}: {error})"
            return ElementWise(is_kept=None, name=name, found=found)
        try:
            parts = _stepped(optimizer, [[list(map(cut, group)) for group in draw] for draw in draws])
        except Exception as error:  # any: it is the script's code
            return ElementWise(is_kept=False, name=name, found=f"{type(error).__name__}: {error}")
    return _compared(name, whole, parts, draws[0], "and on their shards")


def _small_shapes(optimizer: Any) -> list[list[tuple[int, ...]]]:
    """Return a few shapes of each group, at least two, with small sizes: equal sizes stay equal."""
    sizes: dict[int, int] = {1: 1}
    groups = []
    for group in optimizer.param_groups:
        shapes = [
            getattr(parameter, "ds_shape", parameter.shape) for parameter in group["params"][:_MAX_TENSORS]
        ] or [(2, 3)]
        small = [tuple(sizes.setdefault(size, len(sizes) + 1) for size in shape) for shape in shapes]
        groups.append(small if len(small) > 1 else small * 2)
    return groups


def _stepped(optimizer: Any, draws: list[list[list[Any]]]) -> list[Any]:
    """Return each group's elements after steps of a copy, which starts at the first draw.

    Args:
        optimizer: the script's.
        draws: the weights, then the gradients of each step; each a list of tensors for each group.
    """
    from torch.nn import Parameter

    groups = [[Parameter(tensor.clone()) for tensor in group] for group in draws[0]]
    own = copy_on(optimizer, groups)
    for gradients in draws[1:]:
        for parameters, tensors in zip(groups, gradients, strict=True):
            for parameter, tensor in zip(parameters, tensors, strict=True):
                parameter.grad = tensor.clone()
        with without_step_hooks():
            own.step()
    return _joined(groups)


def _joined(groups: list[list[Any]]) -> list[Any]:
    import torch

    return [torch.cat([_whole(tensor.detach()).flatten() for tensor in group]) for group in groups]


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
