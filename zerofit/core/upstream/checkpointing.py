"""The gradient checkpointing switch of models in transformers and diffusers.

Source: transformers/modeling_utils.py (5.23), diffusers/models/modeling_utils.py (0.42).
"""

from __future__ import annotations

import sys
from typing import Any


def can_checkpoint(model: Any) -> bool:
    """Return True if a module has the switch of either library and supports it."""
    if is_of_diffusers(model):
        return bool(model._supports_gradient_checkpointing)
    transformers = sys.modules.get("transformers")
    is_of_transformers = transformers is not None and isinstance(model, transformers.PreTrainedModel)
    return is_of_transformers and bool(model.supports_gradient_checkpointing)


def is_checkpointing(model: Any) -> bool:
    """Return True if gradient checkpointing is on."""
    name = "is_activation_checkpointing"  # transformers from 5.23 on
    return bool(getattr(model, name) if hasattr(model, name) else model.is_gradient_checkpointing)


def enable_checkpointing(model: Any, *, use_reentrant: bool) -> None:
    """Switch gradient checkpointing on in all blocks; diffusers' is never reentrant."""
    if is_of_diffusers(model):
        model.enable_gradient_checkpointing()
    elif hasattr(model, "activation_checkpointing_enable"):  # from 5.23 on
        model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    else:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})


def disable_checkpointing(model: Any) -> None:
    """Switch gradient checkpointing off."""
    if is_of_diffusers(model):
        model.disable_gradient_checkpointing()
    elif hasattr(model, "activation_checkpointing_disable"):  # from 5.23 on
        model.activation_checkpointing_disable()
    else:
        model.gradient_checkpointing_disable()


def is_of_diffusers(model: Any) -> bool:
    """Return True for a model of diffusers itself, False for a wrapper that forwards attributes."""
    return hasattr(type(model), "enable_gradient_checkpointing")
