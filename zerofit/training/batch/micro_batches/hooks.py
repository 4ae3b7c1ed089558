"""Hooks on Accelerator that make prepared models run in micro-batches."""

from __future__ import annotations

import contextlib
import functools
import inspect
from types import MethodType
from typing import TYPE_CHECKING, Any

from zerofit.core.upstream.fsdp2 import gather_around_forward, gradients_unreduced, is_sharded
from zerofit.training.batch.micro_batches.pending_backward import PendingBackward
from zerofit.training.batch.micro_batches.split_model import SplitModel
from zerofit.training.batch.micro_batches.splitter import Splitter
from zerofit.training.setup.trained_groups import trains
from zerofit.training.wrapping import around_steps

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper

_POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD
_PARTITIONED_GRADIENTS = 2
"""The lowest ZeRO stage at which each backward pass reduces gradients
(deepspeed/runtime/zero/stage_1_and_2.py, partition_gradients)."""
_PARTITIONED_PARAMETERS = 3
"""The lowest ZeRO stage at which each forward pass gathers parameters
(https://www.deepspeed.ai/tutorials/zero/)."""


def wrappers(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Make the models that prepare() and prepare_model() return run in micro-batches."""
    most_rows = settings.most_rows
    if most_rows is None or settings.pipeline_parallel_size > 1:  # a pipeline splits its batches itself
        return {}

    def split(accelerator: Any, prepared: Any) -> None:
        if getattr(accelerator, "_zerofit_by_script", True) or not settings.trainer_accumulates:
            for model in prepared if isinstance(prepared, (tuple, list)) else (prepared,):
                _split_model(accelerator, model, most_rows, changes)

    def prepare(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        for model in args:
            restore_forward(model)
        self._zerofit_is_preparing = True
        try:
            prepared = original(self, *args, **kwargs)
        finally:
            self._zerofit_is_preparing = False
        split(self, prepared)
        return prepared

    def prepare_model(
        original: Any,
        self: Any,
        model: Any,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> Any:
        # prepare() calls it too, and may then wrap its result.
        if evaluation_mode or self.__dict__.get("_zerofit_is_preparing", False):
            return original(self, model, device_placement, evaluation_mode)
        restore_forward(model)
        prepared = original(self, model, device_placement, evaluation_mode)
        split(self, prepared)
        return prepared

    def free_memory(original: Any, self: Any, *objects: Any) -> Any:
        self.__dict__.pop("_zerofit_pending_backward", None)
        return original(self, *objects)

    return {
        "prepare": prepare,
        "prepare_model": prepare_model,
        "free_memory": free_memory,  # accelerate's clear() calls it, too
        **_settling(),
    }


def _settling() -> dict[str, Wrapper]:
    """Undo early backward passes of skipped losses before gradients are unscaled or used.

    Under DeepSpeed the engine's step does so (deepspeed/optimizer_step.py).
    """

    def step(self: Any, _: Any, original: Any, closure: Any = None) -> Any:
        if self.sync_gradients:
            settle(self)
        return original(closure)

    before_step = around_steps("_zerofit_settles", step)  # a prepared optimizer's step begins with unscaling

    def prepare_optimizer(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = before_step(original, self, *args, **kwargs)
        # A script may also step its unprepared optimizer.
        if hasattr(prepared.optimizer, "register_step_pre_hook"):
            prepared.optimizer.register_step_pre_hook(lambda *_: settle(self))
        return prepared

    def unscale_gradients(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        settle(self)
        original(self, *args, **kwargs)

    return {"prepare_optimizer": prepare_optimizer, "unscale_gradients": unscale_gradients}


def settle(accelerator: Any, *, except_for: Any | None = None) -> None:
    """Undo early backward passes of losses that the script never used; see PendingBackward.settle.

    Args:
        accelerator: an Accelerator, or None to do nothing.
        except_for: a loss whose backward pass is about to run.
    """
    pending = getattr(accelerator, "_zerofit_pending_backward", None)
    if pending is not None:
        pending.settle(except_for=except_for)


def _split_model(accelerator: Any, prepared: Any, most_rows: int, changes: Changes) -> None:
    import torch

    if not isinstance(prepared, torch.nn.Module):
        return
    if not hasattr(accelerator, "_zerofit_pending_backward"):
        accelerator._zerofit_pending_backward = PendingBackward()
    if trains(prepared):
        if is_sharded(prepared):
            gather_around_forward(prepared)
        stage = _stage(accelerator)
        model = SplitModel(
            prepared,
            no_sync=_no_sync(accelerator, prepared),
            max_over_ranks=_max_over_ranks(accelerator) if stage >= _PARTITIONED_GRADIENTS else None,
            can_run_alone=stage < _PARTITIONED_PARAMETERS,
            may_run_early="FSDP" not in str(accelerator.distributed_type),
        )
        splitter = Splitter(
            model, micro_batch_size=most_rows, changes=changes, pending=accelerator._zerofit_pending_backward
        )
        replace_forward(prepared, splitter)


def replace_forward(model: Any, splitter: Splitter) -> None:
    """Replace a model's forward by a splitter.

    It is a bound method: a copy of the model (a moving average of its weights) gets its own, which runs the
    copy unsplit.

    Args:
        model: as returned by Accelerator.prepare(), without a splitter.
        splitter: the model's.
    """
    original = model.forward
    is_own = "forward" in model.__dict__

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is model:
            return splitter.forward(*args, **kwargs)
        return _of_copy(original, self)(*args, **kwargs)

    def restore(owner: Any) -> None:
        if is_own:
            owner.forward = original if owner is model else _of_copy(original, owner)
        else:
            del owner.forward

    replacement = functools.wraps(getattr(original, "__func__", original))(forward)
    # Trainer reads the dataset columns to keep from the signature.
    signature = inspect.signature(original)
    own = [] if "self" in signature.parameters else [inspect.Parameter("self", _POSITIONAL)]
    parameters = [*own, *signature.parameters.values()]
    replacement.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    replacement._zerofit_splits = True  # type: ignore[attr-defined]
    replacement._zerofit_restore = (replacement, restore)  # type: ignore[attr-defined]
    model.forward = MethodType(replacement, model)


def restore_forward(model: Any) -> None:
    """Restore a model's own forward if another Accelerator or an earlier prepare() has replaced it."""
    forward = getattr(model, "__dict__", {}).get("forward")
    replacement, restore = getattr(forward, "_zerofit_restore", (None, None))
    # functools.wraps copies the attributes to foreign wrappers, which must stay.
    if restore is not None and getattr(forward, "__func__", None) is replacement:
        restore(model)


def _of_copy(original: Any, copied: Any) -> Callable[..., Any]:
    """Return the original forward, bound to a copy of the model."""
    function = getattr(original, "__func__", None)
    return MethodType(function, copied) if function is not None else MethodType(type(copied).forward, copied)


def _no_sync(accelerator: Any, model: Any) -> Callable[[], AbstractContextManager[Any]]:
    """Return a context in which DistributedDataParallel or FSDP2 does not synchronize gradients."""
    if is_sharded(model):
        return lambda: gradients_unreduced(model)
    if "MULTI_" in str(accelerator.distributed_type):
        return lambda: accelerator.no_sync(model)
    return contextlib.nullcontext


def _stage(accelerator: Any) -> int:
    """Return the ZeRO stage; 0 for a single rank, 3 for FSDP."""
    kind = str(accelerator.distributed_type)
    if accelerator.num_processes == 1:
        return 0
    if "FSDP" in kind:
        return _PARTITIONED_PARAMETERS
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return int(plugin.zero_stage) if plugin is not None and "DEEPSPEED" in kind else 0


def _max_over_ranks(accelerator: Any) -> Callable[[list[int]], list[int]]:
    """Return a function that takes the maximum of each number over all ranks.

    It is called in each training forward pass: a rank that alone runs one with gradients waits for the
    others, also at stage 2, where the original script would not.
    """

    def max_over_ranks(numbers: list[int]) -> list[int]:
        import torch

        largest = torch.tensor(numbers, device=accelerator.device)
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
        return [int(number) for number in largest.tolist()]

    return max_over_ranks
