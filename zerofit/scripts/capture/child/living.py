"""The modules that live in a script's process, beside the model that it trains too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def living_modules() -> list[Any]:
    """Return every nn.Module that Python holds."""
    import gc

    import torch

    return [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]


def outermost(is_wanted: Callable[[Any], bool]) -> Any:
    """Return a living module of a kind that is part of no other of that kind; None without one."""
    found = [module for module in living_modules() if is_wanted(module)]
    inner = {id(part) for module in found for part in list(module.modules())[1:]}
    return next((module for module in found if id(module) not in inner), None)


def other_weight_bytes(model: Any) -> int:
    """Return the bytes of the parameters of all living modules but one: of teachers, encoders, autoencoders.

    Args:
        model: the one that is trained.
    """
    import gc

    gc.collect()  # modules that the script has dropped often hold themselves
    own = {id(one) for one in model.parameters()}
    others = {
        id(one): one.numel() * one.element_size()
        for module in living_modules()
        for one in module._parameters.values()
        if one is not None and id(one) not in own
    }
    return sum(others.values())
