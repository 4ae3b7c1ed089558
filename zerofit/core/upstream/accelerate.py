"""accelerate's private names, and what it does otherwise in one release than in another, from 1.10 on."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType


def skip_data_parallel_wrapping(module: ModuleType) -> None:
    """Let a process that is the only one have its models as they are, not wrapped for data parallel.

    Where the variables of a launcher are set, accelerate takes a script with cpu=True for one of several
    ranks, and before 1.13 every script without a GPU. What wraps a model compares the values of its weights.

    Args:
        module: accelerate.state.
    """
    original = module.PartialState.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.num_processes == 1 and self.distributed_type is module.DistributedType.MULTI_CPU:
            self.distributed_type = module.DistributedType.NO

    module.PartialState.__init__ = init


def prepared_models(accelerator: Any) -> list[Any]:
    """Return the models that an Accelerator has prepared, wrapped, in their order; the list is its own."""
    return accelerator._models  # type: ignore[no-any-return]


def prepared_optimizers(accelerator: Any) -> list[Any]:
    """Return the AcceleratedOptimizers that an Accelerator has prepared, in their order."""
    return accelerator._optimizers  # type: ignore[no-any-return]


def prepared_schedulers(accelerator: Any) -> list[Any]:
    """Return the AcceleratedSchedulers that an Accelerator has prepared, in their order."""
    return accelerator._schedulers  # type: ignore[no-any-return]


def prepared_data_loaders(accelerator: Any) -> list[Any]:
    """Return the DataLoaders that an Accelerator has prepared, in their order."""
    return accelerator._dataloaders  # type: ignore[no-any-return]


def is_prepared(data_loader: Any) -> bool:
    """Return True if a DataLoader went through an Accelerator's prepare()."""
    return bool(getattr(data_loader, "_is_accelerate_prepared", False))


def is_in_autocast(module: Any) -> bool:
    """Return True if Accelerator.prepare_model() has put a module's forward into autocast."""
    return hasattr(module, "_original_forward")


def take_autocast_off(module: Any) -> None:
    """Give a module the forward back that it had before Accelerator.prepare_model()."""
    if "_original_forward" in vars(module):
        del module._original_forward
        vars(module).pop("forward", None)
