"""Hooks Accelerator.prepare() so that the models that it returns run in micro-batches."""

from __future__ import annotations

import contextlib
import functools
import inspect
from types import MethodType
from typing import TYPE_CHECKING, Any

from zerofit.runtime.micro_batches.splitter import Splitter
from zerofit.runtime.micro_batches.waiting import Waiting

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from zerofit.runtime.changes import Changes
    from zerofit.runtime.settings import Settings

_POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD
_PARTITIONED_GRADIENTS = 2
"""The ZeRO stage from which each backward pass exchanges gradients (deepspeed/runtime/zero/stage_1_and_2.py,
partition_gradients)."""


def install(accelerator_class: Any, settings: Settings, changes: Changes) -> None:
    """Hook prepare() so that the model that it returns runs in micro-batches.

    Args:
        accelerator_class: accelerate's Accelerator, or a subclass.
        settings: what the plan sets.
        changes: where to note what was changed.
    """
    micro_batch_size = settings.micro_batch_size
    if micro_batch_size is None:
        return
    original = accelerator_class.prepare

    @functools.wraps(original)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = original(self, *args, **kwargs)
        if getattr(self, "_zerofit_by_script", True) or not settings.trainer_accumulates:
            for one in prepared if isinstance(prepared, (tuple, list)) else (prepared,):
                _hook(self, one, micro_batch_size, changes)
        return prepared

    accelerator_class.prepare = prepare


def _hook(accelerator: Any, prepared: Any, micro_batch_size: int, changes: Changes) -> None:
    import torch

    if isinstance(prepared, torch.nn.Module):
        if not hasattr(accelerator, "_zerofit_waiting"):
            accelerator._zerofit_waiting = Waiting()
        if any(parameter.requires_grad for parameter in prepared.parameters()):
            splitter = Splitter(
                prepared,
                micro_batch_size=micro_batch_size,
                no_sync=_no_sync(accelerator, prepared),
                changes=changes,
                waiting=accelerator._zerofit_waiting,
                agreed=_agreed(accelerator),
                may_run_early="FSDP" not in str(accelerator.distributed_type),
            )
            if replace_forward(prepared, splitter):
                accelerator._zerofit_splitter = splitter
    elif hasattr(prepared, "optimizer") and hasattr(prepared.optimizer, "register_step_pre_hook"):
        prepared.optimizer.register_step_pre_hook(lambda *_: _settle(accelerator))


def _settle(accelerator: Any) -> None:
    splitter = getattr(accelerator, "_zerofit_splitter", None)
    if splitter is not None:
        splitter.settle()


def replace_forward(model: Any, splitter: Splitter) -> bool:
    """Put a splitter in the place of a model's forward.

    It is a method of the model: a copy of the model (for a moving average of its weights) has one of its own,
    which runs the copy, unsplit.

    Args:
        model: as Accelerator.prepare() returned it.
        splitter: made for it.

    Returns:
        False where the model has one already.
    """
    original = model.forward
    if getattr(original, "_zerofit_splits", False):
        return False

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is model:
            return splitter.forward(*args, **kwargs)
        return _of_copy(original, self)(*args, **kwargs)

    replacement = functools.wraps(getattr(original, "__func__", original))(forward)
    # Trainer reads the names of the batch's columns from the signature.
    signature = inspect.signature(original)
    own = [] if "self" in signature.parameters else [inspect.Parameter("self", _POSITIONAL)]
    parameters = [*own, *signature.parameters.values()]
    replacement.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    replacement._zerofit_splits = True  # type: ignore[attr-defined]
    model.forward = MethodType(replacement, model)
    return True


def _of_copy(original: Any, copied: Any) -> Callable[..., Any]:
    """Return the forward of a copy of the model: what the original had in its place."""
    function = getattr(original, "__func__", None)
    return MethodType(function, copied) if function is not None else MethodType(type(copied).forward, copied)


def _no_sync(accelerator: Any, model: Any) -> Callable[[], AbstractContextManager[Any]]:
    """Return what keeps DistributedDataParallel from exchanging gradients; others don't, or always do."""
    if "MULTI_" in str(accelerator.distributed_type):
        return lambda: accelerator.no_sync(model)
    return contextlib.nullcontext


def _agreed(accelerator: Any) -> Callable[[list[int]], list[int]] | None:
    """Return how ranks agree, where each piece has collective operations; None where they needn't."""
    if accelerator.num_processes == 1:
        return None
    kind = str(accelerator.distributed_type)
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    stage = plugin.zero_stage if plugin is not None and "DEEPSPEED" in kind else 0
    if stage < _PARTITIONED_GRADIENTS and "FSDP" not in kind:
        return None

    def agreed(numbers: list[int]) -> list[int]:
        import torch

        largest = torch.tensor(numbers, device=accelerator.device)
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
        return [int(number) for number in largest.tolist()]

    return agreed
