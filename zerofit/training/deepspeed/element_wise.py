"""Tests whether an optimizer steps each element by itself, as ZeRO needs, which steps flat buffers."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.upstream.torch import HOOK_FIELDS, without_step_hooks

if TYPE_CHECKING:
    from zerofit.training.changes import Changes

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


def check_element_wise(optimizer: Any, changes: Changes) -> None:
    """Step small copies of an optimizer on tensors and on their concatenation, and compare.

    Args:
        optimizer: a torch.optim.Optimizer with the script's settings; it is not changed.
        changes: receives a warning if the optimizer can't be tried.

    Raises:
        UserError: the two differ, or the optimizer can't step a flat buffer.
    """
    import torch

    if type(optimizer).__module__.partition(".")[0] in _KNOWN:
        return
    name = f"{type(optimizer).__module__.partition('.')[0]}'s {type(optimizer).__name__}"
    generator = torch.Generator().manual_seed(0)
    draws = [
        [[torch.randn(shape, generator=generator) for shape in group] for group in _small_shapes(optimizer)]
        for _ in range(_NUM_STEPS + 1)
    ]
    try:
        apart = _stepped(optimizer, draws)
    except Exception as error:  # any: it is the script's code
        changes.warn(
            f"zerofit: whether {name} steps each element by itself, as ZeRO needs, is not known: on small "
            "tensors "
            f"it fails ({type(error).__name__}: {error})"
        )
        return
    flat = [[[torch.cat([tensor.flatten() for tensor in group])] for group in draw] for draw in draws]
    try:
        together = _stepped(optimizer, flat)
    except Exception as error:  # any: it is the script's code
        raise _not_flat(name, error) from error
    way = max(float((end - start).abs().max()) for end, start in zip(apart, _joined(draws[0]), strict=True))
    distance = max(float((one - two).abs().max()) for one, two in zip(apart, together, strict=True))
    if not distance <= _TOLERANCE * way:
        raise _depends_on_tensors(name, distance / way if way else float("inf"))


def _small_shapes(optimizer: Any) -> list[list[tuple[int, ...]]]:
    """Return a few shapes of each group, at least two, with small sizes: equal sizes stay equal."""
    sizes: dict[int, int] = {1: 1}
    groups = []
    for group in optimizer.param_groups:
        shapes = [getattr(one, "ds_shape", one.shape) for one in group["params"][:_MAX_TENSORS]] or [(2, 3)]
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
    own = _copy_of(optimizer, groups)
    for gradients in draws[1:]:
        for parameters, tensors in zip(groups, gradients, strict=True):
            for parameter, tensor in zip(parameters, tensors, strict=True):
                parameter.grad = tensor.clone()
        with without_step_hooks():
            own.step()
    return _joined(groups)


def _joined(groups: list[list[Any]]) -> list[Any]:
    import torch

    return [torch.cat([tensor.detach().flatten() for tensor in group]) for group in groups]


def _copy_of(optimizer: Any, groups: list[list[Any]]) -> Any:
    """Return a copy of an optimizer on other parameters, without its states and hooks.

    torch's own copy would lose the attributes of subclasses (Optimizer.__getstate__).
    """
    own = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): own, id(optimizer.state): defaultdict(dict)}
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        for place, parameter in enumerate(group["params"]):
            memo[id(parameter)] = parameters[min(place, len(parameters) - 1)]
    fields = {name: value for name, value in vars(optimizer).items() if name not in ("step", *HOOK_FIELDS)}
    own.__dict__.update(copy.deepcopy(fields, memo))
    for name in HOOK_FIELDS:
        setattr(own, name, OrderedDict())
    for group, parameters in zip(own.param_groups, groups, strict=True):
        group["params"][:] = parameters
        if "capturable" in group:
            group["capturable"] = False  # needs a GPU, and changes no result
    return own


def _not_flat(name: str, error: Exception) -> UserError:
    return UserError(
        "optimizer-not-element-wise",
        "the script's optimizer can't step ZeRO's flat buffers",
        found=f"{name}: {type(error).__name__}: {error}",
        why="ZeRO joins parameters into flat buffers, which lack the shapes that this optimizer works with",
        fix="train without ZeRO: --engine native",
    )


def _depends_on_tensors(name: str, share: float) -> UserError:
    return UserError(
        "optimizer-not-element-wise",
        "the script's optimizer would train differently under ZeRO",
        found=f"{name}: three steps on small tensors and on their concatenation end {share:.1g} of the way "
        "apart",
        why="ZeRO joins parameters into flat buffers and cuts these over the ranks; an optimizer that "
        "looks at "
        "single tensors (their norms, ranks or names) then steps otherwise",
        fix="train without ZeRO: --engine native; or use an optimizer that steps each element by itself, "
        "such as "
        "AdamW",
    )
