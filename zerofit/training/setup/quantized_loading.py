"""Makes transformers quantize the base of QLoRA while a script loads it; other models are not quantized."""

from __future__ import annotations

import functools
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from zerofit.core.errors import UserError
from zerofit.core.strategy import ZeroStage
from zerofit.scripts.capture.child.model_record import class_path
from zerofit.training.setup.optimizer_swap import live_optimizers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from zerofit.core.capture import CapturedModel
    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings

_making_again = False
"""True while a Trainer creates its model, which it does more than once."""


def install(module: ModuleType, settings: AppliedSettings, changes: Changes) -> None:
    """Hook from_pretrained."""
    if settings.strategy.quantization is None:
        return
    original = module.PreTrainedModel.from_pretrained.__func__
    choice = _Choice(settings.captured_model)

    @functools.wraps(original)
    def from_pretrained(cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        name = pretrained_model_name_or_path
        if kwargs.get("quantization_config") is not None or not choice.is_the_one(cls, name):
            return original(cls, name, *args, **kwargs)
        if settings.strategy.zero_stage is ZeroStage.PARAMETERS:
            raise _not_partitioned()
        from zerofit.models.changes.quantization import make_trainable, quantization_config, whole_heads

        strategy = settings.strategy
        kwargs["quantization_config"] = quantization_config(strategy.precision, strategy.quant_storage)
        given = kwargs.get("device_map")
        if given is None or settings.uses_fsdp2:
            kwargs["device_map"] = {"": _place(settings)}
        with whole_heads():
            made = original(cls, name, *args, **kwargs)
        model = made[0] if isinstance(made, tuple) else made
        make_trainable(model)
        choice.quantized.add(model)
        stored = f", stored in {strategy.quant_storage}" if strategy.quant_storage is not None else ""
        changes.add(f"{cls.__name__} is loaded in nf4 (bitsandbytes), with quantized scales{stored}")
        if given is not None and given != kwargs["device_map"]:
            changes.add(
                f"{cls.__name__} is loaded on the host in place of device_map={given!r}: it is sharded"
            )
        return made

    module.PreTrainedModel.from_pretrained = classmethod(from_pretrained)


def _place(settings: AppliedSettings) -> str | int:
    """Return where the base is loaded: on the GPU that trains it, or on the host if it is sharded.

    A GPU may hold no more than its shards. FSDP2 moves unit by unit to the GPU and keeps this rank's part
    (torch 2.13, _fully_shard/_fsdp_init.py, _move_states_to_device), while transformers and TRL without a
    device_map quantize the whole model on each GPU (transformers 5.23, quantizer_bnb_4bit.py).
    """
    return "cpu" if settings.on_cpu or settings.uses_fsdp2 else int(os.environ.get("LOCAL_RANK", "0"))


@contextmanager
def for_trainer() -> Iterator[None]:
    """Quantize models loaded inside even if another such model exists, which a Trainer then discards."""
    global _making_again
    _making_again = True
    try:
        yield
    finally:
        _making_again = False


class _Choice:
    """Decides which of the models that a script loads is trained: the captured one, else the first."""

    def __init__(self, captured: CapturedModel | None) -> None:
        self._wanted = None if captured is None else (captured.class_path, captured.name)
        self.quantized: WeakSet[Any] = WeakSet()

    def is_the_one(self, model_class: Any, name: Any) -> bool:
        """Return True if a model about to be loaded is the trained one, not a teacher of the same class.

        After an optimizer step, it is no teacher but the next model of a loop over folds or seeds.
        """
        own = (class_path(model_class), str(name))
        if self._wanted is None:
            self._wanted = own
        if own != self._wanted:
            return False
        return _making_again or not self.quantized or any(optimizer.state for optimizer in live_optimizers())


def _not_partitioned() -> UserError:
    return UserError(
        "quantized-base-not-partitioned",
        "a quantized base can't be combined with ZeRO-3",
        found="weights in nf4, and ZeRO-3",
        why="transformers makes quantized weights without zero.Init, and DeepSpeed's engine then moves the "
        "whole model to each GPU before it partitions it (deepspeed 0.19.8, runtime/engine.py, "
        "_configure_distributed_model)",
        fix="shard the base by FSDP2: --engine fsdp2; or use ZeRO-2 or less, or plain weights",
        see="https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1249",
    )
