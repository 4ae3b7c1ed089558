"""Sets the attention implementation of a model that is made already."""

from __future__ import annotations

from typing import Any

from zerofit.errors import UserError
from zerofit.model_changes.parts import transformers_parts

SEE = "https://huggingface.co/docs/transformers/en/attention_interface"


def set_attention(model: Any, name: str) -> tuple[str, ...]:
    """Set the attention implementation of the models of transformers in a module.

    Args:
        model: a torch.nn.Module that is not yet wrapped for training.
        name: transformers' attn_implementation, such as "sdpa" or "flash_attention_2".

    Returns:
        What was changed, in words.

    Raises:
        UserError: a model lacks it, or it is not installed.
    """
    parts = tuple(transformers_parts(model))
    if not parts:
        return (f"attention is left as it is: {type(model).__name__} has no model of transformers in it",)
    notes = []
    for part in parts:
        own = part.config._attn_implementation
        if own == name:
            continue
        _set_in(part, name)
        notes.append(
            f"attention of {type(part).__name__} is {part.config._attn_implementation}; the script has {own}"
        )
    return tuple(notes)


def _set_in(part: Any, name: str) -> None:
    own = part.config._attn_implementation
    try:
        if not part._can_set_attn_implementation():
            raise ValueError("its code has attention written out, and can't be set to another")
        part.set_attn_implementation(name)
    except (ValueError, ImportError, OSError, RuntimeError) as error:
        part.config._attn_implementation_internal = own
        raise UserError(
            "attention-not-available",
            f"this model can't take {name} as its attention",
            found=f"--attention {name}, and {type(part).__name__} with {own}",
            why=" ".join(str(error).split()),
            fix=f"give {' or '.join(available(part))}, or leave --attention out",
            see=SEE,
        ) from error


def available(part: Any) -> tuple[str, ...]:
    """Return the attention implementations that a model of transformers can take here."""
    from transformers.utils import is_flash_attn_2_available, is_torch_flex_attn_available

    own = part.config._attn_implementation
    if not part._can_set_attn_implementation():
        return (own,)
    has = {
        "eager": True,
        "sdpa": part._supports_sdpa,
        "flex_attention": part._supports_flex_attn and is_torch_flex_attn_available(),
        "flash_attention_2": part._supports_flash_attn and is_flash_attn_2_available(),
    }
    return tuple(dict.fromkeys([*(name for name, can in has.items() if can), own]))
