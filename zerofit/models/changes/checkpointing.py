"""Switches gradient checkpointing on or off for all or some of a model's blocks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.upstream.checkpointing import (
    can_checkpoint,
    disable_checkpointing,
    enable_checkpointing,
    is_checkpointing,
)
from zerofit.core.upstream.transformers import checkpoint_every, checkpointed_blocks, checkpointing_function

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SEE = "https://huggingface.co/docs/transformers/en/grad_checkpointing"


def set_checkpointing(
    model: Any, *, wanted: bool | None, every: int = 1, allow_reentrant: bool = True
) -> tuple[str, ...]:
    """Switch gradient checkpointing on or off in a model and in transformers' and diffusers' models in it.

    Checkpointing enabled here is non-reentrant, so that adapters on a frozen model don't need inputs with
    gradients. The script's own checkpointing stays as it is. The KV cache setting is not changed, since
    transformers' layers don't use the cache while they train with checkpointing.

    Args:
        model: a torch.nn.Module that is not yet wrapped for training.
        wanted: whether to checkpoint; None leaves it to the script, unless `every` is above 1.
        every: checkpoint the first of every this many blocks; a value above 1 implies `wanted`.
        allow_reentrant: whether the script's own checkpointing may stay reentrant.

    Returns:
        Notes on what was changed.

    Raises:
        UserError: only some blocks should be checkpointed, and the model has no switch per block.
    """
    if wanted is None and every > 1:
        wanted = True
    able = checkpointing_parts(model)
    if wanted and not able:
        return (f"gradient checkpointing is not enabled: {type(model).__name__} does not support it",)
    notes = []
    for part in able:
        notes += _set_in(part, wanted=wanted, every=every, allow_reentrant=allow_reentrant)
    return tuple(notes)


def check_every(model: Any, every: int) -> None:
    """Check that a model can checkpoint only some of its blocks.

    Args:
        model: a transformers model, or a peft wrapper around one.
        every: checkpoint the first of every this many blocks.

    Raises:
        UserError: its blocks can't be switched individually.
    """
    if every == 1 or checkpointed_blocks(model):
        return
    raise UserError(
        "checkpointing-all-or-nothing",
        "this model can only checkpoint all of its blocks",
        found=f"gradient checkpointing of one in {every} blocks, and {type(model).__name__}",
        why="its blocks can't be switched individually (not transformers' GradientCheckpointingLayer)",
        fix="checkpoint all blocks, or none",
        see=SEE,
    )


def _set_in(part: Any, *, wanted: bool | None, every: int, allow_reentrant: bool) -> list[str]:
    name, is_on = type(part).__name__, is_checkpointing(part)
    if wanted is False or not (wanted or is_on):
        if not is_on:
            return []
        disable_checkpointing(part)
        return [f"gradient checkpointing is off in {name}; the script had it on"]
    check_every(part, every)
    notes = []
    if not is_on:
        enable_checkpointing(part, use_reentrant=False)
        notes.append(f"gradient checkpointing is on in {name}")
    elif not allow_reentrant and _is_reentrant(part):
        enable_checkpointing(part, use_reentrant=False)
        notes.append(f"gradient checkpointing in {name} has use_reentrant=False; the script says True")
    if every > 1:
        num_on, num_blocks = checkpoint_every(part, every)
        notes.append(f"gradient checkpointing recomputes {num_on} of {num_blocks} blocks of {name}")
    return notes


def _is_reentrant(part: Any) -> bool:
    functions = [checkpointing_function(module) for module in part.modules()]
    # torch's own default is True if unset (torch/utils/checkpoint.py, 2.13 warns).
    return any(
        isinstance(function, partial) and function.keywords.get("use_reentrant", True)
        for function in functions
    )


def checkpointing_parts(module: Any) -> tuple[Any, ...]:
    """Return the outermost transformers and diffusers models in a module that support checkpointing."""
    import transformers

    parts = _outermost(
        module, lambda part: isinstance(part, transformers.PreTrainedModel) or can_checkpoint(part)
    )
    return tuple(part for part in parts if can_checkpoint(part))


def transformers_parts(module: Any) -> Iterator[Any]:
    """Yield the outermost transformers models in a torch.nn.Module."""
    import transformers

    return _outermost(module, lambda part: isinstance(part, transformers.PreTrainedModel))


def _outermost(module: Any, is_part: Callable[[Any], bool]) -> Iterator[Any]:
    if is_part(module):
        yield module
        return
    for child in module.children():
        yield from _outermost(child, is_part)
