"""copy_on: a copy of a script's optimizer on other parameters, to try its step()."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any

from zerofit.core.upstream.torch import HOOK_FIELDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def copy_on(optimizer: Any, groups: Sequence[Sequence[Any]]) -> Any:
    """Return a copy of an optimizer on other parameters, without its hooks and the states of its steps.

    torch's own copy would lose the attributes of subclasses (Optimizer.__getstate__). What the constructor
    has put into the state is kept where it has no tensors, such as APOLLO's seeds.

    Args:
        groups: the parameters of each group; where they are fewer than the optimizer's, the last stands for
            all others.
    """
    own = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): own}
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        for place, parameter in enumerate(group["params"]):
            memo[id(parameter)] = parameters[min(place, len(parameters) - 1)]
    memo[id(optimizer.state)] = _state_of(optimizer, memo)
    fields = {name: value for name, value in vars(optimizer).items() if name not in ("step", *HOOK_FIELDS)}
    own.__dict__.update(copy.deepcopy(fields, memo))
    for name in HOOK_FIELDS:
        setattr(own, name, OrderedDict())
    for group, parameters in zip(own.param_groups, groups, strict=True):
        group["params"][:] = parameters
        if "capturable" in group:
            group["capturable"] = False  # needs a GPU, and changes no result
    return own


def _state_of(optimizer: Any, memo: Mapping[int, Any]) -> defaultdict[Any, dict[str, Any]]:
    import torch

    state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
    for parameter, values in optimizer.state.items():
        if id(parameter) in memo and not any(isinstance(value, torch.Tensor) for value in values.values()):
            state[memo[id(parameter)]] = copy.deepcopy(values)
    return state
