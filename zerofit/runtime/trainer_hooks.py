"""Hooks into transformers: a plan's settings in TrainingArguments, before anything reads them."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zerofit.render.trainer import training_arguments
from zerofit.runtime.settings import check_micro_batch
from zerofit.strategy import Strategy

if TYPE_CHECKING:
    from types import ModuleType

    from zerofit.runtime.changes import Changes
    from zerofit.runtime.settings import Settings


def install(module: ModuleType, settings: Settings, changes: Changes) -> None:
    """Hook TrainingArguments and its subclasses so that Trainer scripts train as the plan says.

    Args:
        module: transformers.training_args.
        settings: what to set.
        changes: where to note what was changed.
    """
    original = module.TrainingArguments.__post_init__

    @functools.wraps(original)
    def post_init(self: Any) -> None:
        check_micro_batch(settings, self.per_device_train_batch_size)
        for name, value in _arguments(self, settings).items():
            own = getattr(self, name)
            if own != value:
                changes.add(f"TrainingArguments.{name} is {value}; the script says {own}")
                setattr(self, name, value)
        if settings.uses_deepspeed and self.deepspeed:
            changes.add(
                "DeepSpeed is configured as the plan says; the script says TrainingArguments.deepspeed"
            )
            self.deepspeed = None  # accelerate's launcher brings the plan's
        if settings.on_cpu:
            _allow_bf16_on_cpu(module)
        original(self)

    module.TrainingArguments.__post_init__ = post_init


def _arguments(script: Any, settings: Settings) -> dict[str, Any]:
    precision = settings.precision
    if settings.precision_is_default and (script.bf16 or script.fp16):
        precision = None
    strategy = replace(
        Strategy(),
        precision=precision,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        gradient_clipping=settings.gradient_clipping,
    )
    return training_arguments(strategy, deepspeed_file=None)


def _allow_bf16_on_cpu(module: ModuleType) -> None:
    """Let bf16 pass the check for a GPU: `use_cpu`, which it asks for, would switch DeepSpeed off."""
    module.is_torch_bf16_gpu_available = lambda: True  # type: ignore[attr-defined]
