"""accelerate's private names, and differences between its releases, from 1.10 on."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType


def skip_data_parallel_wrapping(module: ModuleType) -> None:
    """Keep accelerate from wrapping models for data parallelism in a single process.

    With a launcher's environment variables set, accelerate treats a script with cpu=True as one of several
    ranks, and before 1.13 every script without a GPU. Wrapping a model compares the values of its weights.

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


def shard_on_cpu_ranks(module: ModuleType) -> None:
    """Make accelerate use FSDP on CPU ranks too, as it does on GPUs, for a rehearsal without GPUs.

    AcceleratorState enters FSDP for MULTI_GPU and its kin alone (accelerate/state.py, 1.10 to 1.15).

    Args:
        module: accelerate.state.
    """
    original = module.AcceleratorState.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        from torch.distributed import fsdp

        is_first = not module.AcceleratorState._shared_state
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        on_cpu = (module.DistributedType.MULTI_CPU, module.DistributedType.NO)
        if not is_first or fsdp_plugin is None or self.distributed_type not in on_cpu:
            return
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
        if isinstance(fsdp_plugin.cpu_offload, fsdp.CPUOffloadPolicy):
            fsdp_plugin.cpu_offload = fsdp.OffloadPolicy()  # the ranks are on the host, and pin no memory
        self.fsdp_plugin = fsdp_plugin
        self.distributed_type = module.DistributedType.FSDP
        # Else the next AcceleratorState() takes the type from there again.
        module.PartialState._shared_state["distributed_type"] = module.DistributedType.FSDP

    module.AcceleratorState.__init__ = init


def load_states_under_fsdp2(module: Any) -> None:
    """Make a release that resumes no optimizer states under FSDP2 load them as later releases do.

    It loads what optimizer.state_dict() has, which is nothing before the first step, and goes on with new
    states without a word (utils/fsdp_utils.py, load_fsdp_optimizer: 1.10; not in 1.15).

    Args:
        module: accelerate.utils.fsdp_utils.
    """
    original = module.load_fsdp_optimizer
    if "get_optimizer_state_dict" in original.__code__.co_names:
        return

    @functools.wraps(original)
    def load(plugin: Any, accelerator: Any, optimizer: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        def states_by_name() -> Any:
            del optimizer.state_dict  # which torch calls
            return get_optimizer_state_dict(model, optimizer, options=module._prepare_sd_options(plugin))

        if plugin.fsdp_version == 2:
            optimizer.state_dict = states_by_name
        try:
            return original(plugin, accelerator, optimizer, model, *args, **kwargs)
        finally:
            vars(optimizer).pop("state_dict", None)

    module.load_fsdp_optimizer = load


def has_state() -> bool:
    """Return True if this process has an Accelerator, a PartialState or TrainingArguments, which make one."""
    state = sys.modules.get("accelerate.state")
    return state is not None and bool(state.PartialState._shared_state)


def prepared_models(accelerator: Any) -> list[Any]:
    """Return the wrapped models that an Accelerator has prepared, in order; the list is accelerate's own."""
    return accelerator._models  # type: ignore[no-any-return]


def prepared_optimizers(accelerator: Any) -> list[Any]:
    """Return the AcceleratedOptimizers that an Accelerator has prepared, in order."""
    return accelerator._optimizers  # type: ignore[no-any-return]


def prepared_schedulers(accelerator: Any) -> list[Any]:
    """Return the AcceleratedSchedulers that an Accelerator has prepared, in order."""
    return accelerator._schedulers  # type: ignore[no-any-return]


def prepared_data_loaders(accelerator: Any) -> list[Any]:
    """Return the DataLoaders that an Accelerator has prepared, in order."""
    return accelerator._dataloaders  # type: ignore[no-any-return]


def is_prepared(data_loader: Any) -> bool:
    """Return True if a DataLoader went through an Accelerator's prepare()."""
    return bool(getattr(data_loader, "_is_accelerate_prepared", False))


def is_in_autocast(module: Any) -> bool:
    """Return True if Accelerator.prepare_model() has wrapped a module's forward in autocast."""
    return hasattr(module, "_original_forward")


def take_autocast_off(module: Any) -> None:
    """Restore the forward that a module had before Accelerator.prepare_model()."""
    if "_original_forward" in vars(module):
        del module._original_forward
        vars(module).pop("forward", None)
