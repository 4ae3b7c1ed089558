"""Keeps bitsandbytes' per-parameter settings under DeepSpeed: 32-bit states of embeddings.

bitsandbytes looks them up by parameter at its first step, when DeepSpeed has already replaced each group's
parameters by a flat fp32 tensor: embeddings would silently get 8-bit states under ZeRO. Here such parameters
get their own groups, which hold the settings.
"""

from __future__ import annotations

import functools
from types import MethodType
from typing import TYPE_CHECKING, Any

from zerofit.training.step import schedulers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zerofit.training.changes import Changes

_KEY = "zerofit_override"
"""Key of a parameter group for these settings."""


def keep_overrides(objects: Iterable[Any], changes: Changes) -> None:
    """Move parameters with their own settings into separate groups, in bitsandbytes' optimizers."""
    for optimizer in objects:
        if type(optimizer).__module__.split(".")[0] != "bitsandbytes" or not hasattr(optimizer, "mng"):
            continue
        overrides = _overrides(optimizer)
        if not overrides:
            continue
        _split(optimizer, overrides)
        original = optimizer.get_config
        optimizer.get_config = MethodType(functools.wraps(original)(_with_own(original)), optimizer)
        changes.add(
            f"parameters with their own settings in {type(optimizer).__name__}, such as embeddings with "
            "32-bit states, get their own parameter group: DeepSpeed would flatten them with the others"
        )


def _with_own(original: Any) -> Any:
    def get_config(self: Any, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        return {**original(gindex, pindex, group), **group.get(_KEY, {})}

    return get_config


def _overrides(optimizer: Any) -> dict[int, dict[str, Any]]:
    """Return the settings of this optimizer's parameters, by their ids."""
    manager = optimizer.mng
    told: dict[int, dict[str, Any]] = dict(manager.pid2config)
    for module, attribute, config in manager.module_weight_config_triple:
        told[id(getattr(module, attribute))] = config
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {key: config for key, config in told.items() if key in held}


def _split(optimizer: Any, overrides: dict[int, dict[str, Any]]) -> None:
    """Split groups by their parameters' settings; the first part of each group stays in place."""
    for index, group in enumerate(list(optimizer.param_groups)):
        parts: dict[Any, list[Any]] = {}
        for parameter in group["params"]:
            config = overrides.get(id(parameter), {})
            parts.setdefault(tuple(sorted(config.items())), []).append(parameter)
        if () in parts:
            parts = {(): parts.pop(()), **parts}  # parameters without settings stay
        for number, (config, parameters) in enumerate(parts.items()):
            own = {_KEY: dict(config)} if config else {}
            if number == 0:
                group.update(own, params=parameters)
            else:
                optimizer.param_groups.append({**group, **own, "params": parameters})
                schedulers.repeat_entry(optimizer, index)
