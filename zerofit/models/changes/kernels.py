"""Sets the attention implementation of a model, and tf32 in this process."""

from __future__ import annotations

from typing import Any

from zerofit.core.errors import UserError
from zerofit.core.upstream.transformers import (
    attention_of,
    can_set_attention,
    put_attention_back,
    supported_attention,
)
from zerofit.models.changes.checkpointing import transformers_parts

SEE = "https://huggingface.co/docs/transformers/en/attention_interface"


def set_attention(model: Any, name: str) -> tuple[str, ...]:
    """Set the attention implementation of transformers' models in a module.

    Args:
        model: a torch.nn.Module that is not yet wrapped for training.
        name: transformers' attn_implementation, such as "sdpa" or "flash_attention_2".

    Returns:
        Notes on what was changed.

    Raises:
        UserError: a model does not support it, or it is not installed.
    """
    parts = tuple(transformers_parts(model))
    if not parts:
        return (f"attention is unchanged: {type(model).__name__} contains no transformers model",)
    notes = []
    for part in parts:
        own = attention_of(part.config)
        if own == name:
            continue
        _set_in(part, name)
        notes.append(
            f"attention of {type(part).__name__} is {attention_of(part.config)}; "
            f"the script has {own or 'none'}"
        )
    return tuple(notes)


def _set_in(part: Any, name: str) -> None:
    own = attention_of(part.config)
    try:
        if not can_set_attention(part):
            raise ValueError("its code has its own attention, and can't use another implementation")
        part.set_attn_implementation(name)
    except (ValueError, ImportError, OSError, RuntimeError) as error:
        put_attention_back(part.config, own)
        raise UserError(
            "attention-not-available",
            f"this model does not support {name} attention",
            found=f"attention {name}, and {type(part).__name__} with {own}",
            why=" ".join(str(error).split()),
            fix=f"use {' or '.join(available(part))}, or keep the model's own",
            see=SEE,
        ) from error


def available(part: Any) -> tuple[str, ...]:
    """Return the attention implementations that a transformers model supports and that are installed."""
    from transformers.utils import is_flash_attn_2_available, is_torch_flex_attn_available

    own = attention_of(part.config)
    if not can_set_attention(part):
        return (own,) if own else ()
    installed = {
        "flex_attention": is_torch_flex_attn_available(),
        "flash_attention_2": is_flash_attn_2_available(),
    }
    supported = [name for name in supported_attention(part) if installed.get(name, True)]
    return tuple(dict.fromkeys(name for name in (*supported, own) if name))


_AMPERE = 8
"""The first compute capability (major) with tf32
(https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices)."""


def has_tf32() -> bool:
    """Return True if this process has a GPU with tf32."""
    import torch

    return bool(torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= _AMPERE)


def set_tf32(wanted: bool) -> tuple[str, ...]:
    """Enable or disable tf32 in fp32 matrix products of this process, but not in convolutions.

    Uses torch.set_float32_matmul_precision. TrainingArguments.tf32 sets torch.backends.fp32_precision
    instead, after which torch.get_float32_matmul_precision(), which torch.compile calls, raises an error
    (torch 2.13).

    Returns:
        A note on what was changed.
    """
    import torch

    torch.set_float32_matmul_precision("high" if wanted else "highest")
    if not wanted:
        return ("fp32 matrix products keep full precision (tf32 is off)",)
    where = "" if has_tf32() else ", without effect here: no GPU of this process has tf32"
    return (f"fp32 matrix products use tf32{where}",)
