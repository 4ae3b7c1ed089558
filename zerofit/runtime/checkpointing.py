"""Switches gradient checkpointing on or off in the model that a script prepares."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.runtime.changes import Changes
    from zerofit.runtime.settings import Settings


def install(accelerator_class: Any, settings: Settings, changes: Changes) -> None:
    """Hook prepare() so that the model checkpoints as the plan says.

    Args:
        accelerator_class: accelerate's Accelerator, or a subclass.
        settings: what the plan sets.
        changes: where to note what was changed.
    """
    wanted = settings.gradient_checkpointing
    if wanted is None:
        return
    for name in ("prepare", "prepare_model"):
        original = getattr(accelerator_class, name)

        @functools.wraps(original)
        def prepare(self: Any, *objects: Any, original: Any = original, **kwargs: Any) -> Any:
            import torch

            for item in objects:
                if isinstance(item, torch.nn.Module) and self._zerofit_by_script:
                    set_checkpointing(item, changes, wanted=wanted)
            return original(self, *objects, **kwargs)

        setattr(accelerator_class, name, prepare)


def set_checkpointing(model: Any, changes: Changes, *, wanted: bool) -> None:
    """Switch gradient checkpointing of transformers on or off in a model, or in those that it is made of.

    It is the kind that is not reentrant: it needs no inputs with gradients, so that adapters on a frozen
    model need nothing more. The model's cache is left alone: transformers' layers do without it while they
    train and checkpoint, and the script's own generation and the saved configuration keep it.

    Args:
        model: a torch.nn.Module that is not yet wrapped for training.
        changes: where to note what was changed.
        wanted: whether to checkpoint.
    """
    parts = tuple(_transformers_parts(model))
    able = [part for part in parts if part.supports_gradient_checkpointing]
    name = type(model).__name__
    if wanted and not able:
        changes.add(f"gradient checkpointing is not switched on: {name} has none")
    for part in able:
        if _checkpoints(part) == wanted:
            continue
        _switch(part, wanted=wanted)
        if wanted:
            changes.add(f"gradient checkpointing is on in {type(part).__name__}")
        else:
            changes.add(f"gradient checkpointing is off in {type(part).__name__}; the script switched it on")


def _transformers_parts(module: Any) -> Iterator[Any]:
    """Yield the outermost models of transformers in a module: itself, peft's base, parts of an own class."""
    import transformers

    if isinstance(module, transformers.PreTrainedModel):
        yield module
        return
    for child in module.children():
        yield from _transformers_parts(child)


# transformers 5.23 has renamed it from gradient to activation checkpointing (transformers/modeling_utils.py).


def _checkpoints(model: Any) -> bool:
    name = "is_activation_checkpointing"
    return bool(getattr(model, name) if hasattr(model, name) else model.is_gradient_checkpointing)


def _switch(model: Any, *, wanted: bool) -> None:
    if not wanted:
        disable = getattr(model, "activation_checkpointing_disable", None)
        (disable or model.gradient_checkpointing_disable)()
    elif hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
