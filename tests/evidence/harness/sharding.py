"""FSDP on CPU ranks: the shim by which accelerate enters it there, and what a sharded model shows."""

from __future__ import annotations

import functools
import os
from typing import Any


def enter_on_cpu() -> None:
    """Make accelerate enter FSDP on CPU ranks, as it does on GPUs: the one place where it is made to.

    FSDP 1 takes no CPU for its device, so that of it only what fails before it shards can be seen.
    """
    from accelerate.state import PartialState
    from sharded.real import allow_on_cpu

    allow_on_cpu()
    original = PartialState.__init__

    @functools.wraps(original)
    def init(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        original(self, cpu or "RANK" in os.environ, **kwargs)

    PartialState.__init__ = init


def note_sharded(before: Any, after: Any) -> None:
    """Call `before` with each model that Accelerator.prepare() is about to shard, `after` with what it made.

    Args:
        before: takes the whole model.
        after: takes the sharded one.
    """
    import accelerate.accelerator as module

    shard = module.fsdp2_prepare_model

    @functools.wraps(shard)
    def shard_and_note(accelerator: Any, model: Any) -> Any:
        before(model)
        sharded = shard(accelerator, model)
        after(sharded)
        return sharded

    module.fsdp2_prepare_model = shard_and_note


def is_sharded(model: Any) -> bool:
    """Return True if FSDP 1 or 2 holds a model's weights."""
    return bool(units_of(model))


def units_of(model: Any) -> list[Any]:
    """Return the modules that FSDP gathers on their own."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    kinds = (FSDPModule, FullyShardedDataParallel)
    return [] if model is None else [module for module in model.modules() if isinstance(module, kinds)]


def whole_state(model: Any) -> dict[str, Any]:
    """Return a sharded model's whole weights by their names in the plain one; every rank must call it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    return {name.replace("_checkpoint_wrapped_module.", ""): weight for name, weight in state.items()}


def shown_by(model: Any) -> dict[str, Any]:
    """Return what a sharded model shows of its settings."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
    from torch.distributed.fsdp import FullyShardedDataParallel

    units = units_of(model)
    is_first = isinstance(units[0], FullyShardedDataParallel)
    strategy = units[0].sharding_strategy.name if is_first else None
    types = _sharded_types(model) | _whole_types(model)
    return {
        "fsdp_version": 1 if is_first else 2,
        "units": len(units),
        "sharding_strategy": strategy,
        "parameter_dtype": "bfloat16" if "bfloat16" in types else "float32",
        "reshards_after_forward": None if is_first else _reshards(units),
        "checkpointed_blocks": sum(isinstance(module, CheckpointWrapper) for module in model.modules()),
        "sharded_types": sorted(_sharded_types(model)),
        "whole_types": sorted(_whole_types(model)),
    }


def _reshards(units: list[Any]) -> bool:
    """Return whether the blocks, which are the units below the root, are resharded behind their forward."""
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units[1:] or units]
    return any(bool(group and group._reshard_after_forward) for group in groups)


def _sharded_types(model: Any) -> set[str]:
    return {
        str(weight.dtype).removeprefix("torch.")
        for weight in model.parameters()
        if hasattr(weight, "_local_tensor") or hasattr(weight, "_is_flat_param")
    }


def _whole_types(model: Any) -> set[str]:
    return {
        str(weight.dtype).removeprefix("torch.")
        for weight in model.parameters()
        if not hasattr(weight, "_local_tensor") and not hasattr(weight, "_is_flat_param")
    }
