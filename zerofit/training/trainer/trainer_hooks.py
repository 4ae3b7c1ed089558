"""Hooks into transformers: a plan's settings in TrainingArguments, before anything reads them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.scripts.on_import import when_imported
from zerofit.training.trainer import trainer_class, trainer_fields

if TYPE_CHECKING:
    from types import ModuleType

    from zerofit.training.changes import Changes
    from zerofit.training.settings import Settings


def install(module: ModuleType, settings: Settings, changes: Changes) -> None:
    """Hook TrainingArguments, Trainer and their subclasses so that Trainer scripts train as the plan says.

    Args:
        module: transformers.training_args.
        settings: what to set.
        changes: where to note what was changed.
    """
    if settings.on_cpu:
        _allow_bf16_on_cpu(module)
    hook_arguments(module.TrainingArguments, settings, changes)
    original = module.TrainingArguments.__post_init__
    is_trainer_hooked = False

    @functools.wraps(original)
    def post_init(self: Any) -> None:
        nonlocal is_trainer_hooked
        if not is_trainer_hooked:
            # Not before: while transformers.trainer imports transformers.training_args it has no Trainer yet.
            is_trainer_hooked = True
            when_imported(
                "transformers.trainer", lambda found: trainer_class.install(found.Trainer, settings, changes)
            )
        original(self)

    module.TrainingArguments.__post_init__ = post_init


def hook_arguments(arguments_class: Any, settings: Settings, changes: Changes) -> None:
    """Hook one class so that its objects are made as the plan says.

    Args:
        arguments_class: TrainingArguments or a subclass.
        settings: what to set.
        changes: where to note what was changed.
    """
    original = arguments_class.__post_init__

    @functools.wraps(original)
    def post_init(self: Any) -> None:
        trainer_fields.apply(self, settings, changes)
        own_sections = _take_deepspeed(self, settings, changes)
        original(self)
        if own_sections:
            self.deepspeed_plugin.hf_ds_config.config.update(own_sections)

    arguments_class.__post_init__ = post_init


def _take_deepspeed(arguments: Any, settings: Settings, changes: Changes) -> dict[str, Any]:
    """Take the script's own DeepSpeed configuration away, and return its optimizer and its scheduler."""
    if not settings.uses_deepspeed or not arguments.deepspeed:
        return {}
    config = _config(arguments.deepspeed)
    arguments.deepspeed = None  # accelerate's launcher brings the plan's
    kept = [name for name in ("optimizer", "scheduler") if name in config]
    if settings.optimizer is not None and "optimizer" in kept:
        kept.remove("optimizer")
    text = "DeepSpeed is configured as the plan says; the script says TrainingArguments.deepspeed"
    changes.add(f"{text}, whose {' and '.join(kept)} stay" if kept else text)
    return {name: config[name] for name in kept}


def _config(deepspeed: Any) -> dict[str, Any]:
    if isinstance(deepspeed, dict):
        return deepspeed
    text = str(deepspeed)
    return dict(json.loads(text if text.startswith("{") else Path(text).read_text(encoding="utf-8")))


def _allow_bf16_on_cpu(module: ModuleType) -> None:
    """Let bf16 pass the check for a GPU: `use_cpu`, which it asks for, would switch DeepSpeed off."""
    module.is_torch_bf16_gpu_available = lambda: True  # type: ignore[attr-defined]
