"""Switches gradient checkpointing on or off for all or some of a model's blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.upstream.checkpointing import (
    can_checkpoint,
    can_offload,
    disable_checkpointing,
    enable_checkpointing,
    is_checkpointing,
    is_offloaded,
    is_reentrant,
    make_not_reentrant,
    offload_checkpoints,
)
from zerofit.core.upstream.transformers import checkpoint_every, checkpointed_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STAYS_ON_GPU = "activations-stay-on-gpu"
"""The error of a model whose checkpointed inputs can't be offloaded."""
SEE = "https://huggingface.co/docs/transformers/en/grad_checkpointing"


def set_checkpointing(
    model: Any,
    *,
    wanted: bool | None,
    every: int = 1,
    offload: bool = False,
    allow_reentrant: bool = True,
) -> tuple[str, ...]:
    """Switch gradient checkpointing on or off in a model and in transformers' and diffusers' models in it.

    Checkpointing enabled here is non-reentrant, so that adapters on a frozen model don't need inputs with
    gradients. The script's own checkpointing stays as it is. The KV cache setting is not changed, since
    transformers' layers don't use the cache while they train with checkpointing.

    Args:
        model: a torch.nn.Module that is not yet wrapped for training.
        wanted: whether to checkpoint; None leaves it to the script, unless `every` is above 1 or `offload`.
        every: checkpoint the first of every this many blocks; a value above 1 implies `wanted`.
        offload: store the inputs of checkpointed blocks in host memory, which implies `wanted`; False leaves
            them where the script has them.
        allow_reentrant: whether the script's own checkpointing may stay reentrant.

    Returns:
        Notes on what was changed.

    Raises:
        UserError: only some blocks should be checkpointed, and the model has no switch per block; or their
            inputs should be stored in host memory, and it calls torch's function itself.
    """
    if wanted is None and (every > 1 or offload):
        wanted = True
    able = checkpointing_parts(model)
    if wanted and not able:
        return (f"gradient checkpointing is not enabled: {type(model).__name__} does not support it",)
    notes = []
    for part in able:
        notes += _set_in(part, wanted=wanted, every=every, offload=offload, allow_reentrant=allow_reentrant)
    return tuple(notes)


def offload_when_enabled(model: Any) -> tuple[str, ...]:
    """Store the inputs of checkpointed blocks in host memory as soon as something enables checkpointing.

    Args:
        model: as for set_checkpointing.

    Returns:
        Notes on what was changed.

    Raises:
        UserError: the model calls torch's function itself.
    """
    notes = []
    for part in checkpointing_parts(model):
        check_offload(part)
        offload_checkpoints(part)
        notes.append(
            f"gradient checkpointing of {type(part).__name__} stores inputs of blocks in host memory"
        )
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


def check_offload(model: Any) -> None:
    """Check that the inputs of a model's checkpointed blocks can be stored in host memory.

    Args:
        model: of transformers or diffusers.

    Raises:
        UserError: the model calls torch's function itself.
    """
    if can_offload(model):
        return
    raise UserError(
        STAYS_ON_GPU,
        "the inputs of this model's checkpointed blocks can't be stored in host memory",
        found=f"activation offload, and {type(model).__name__}",
        why="its own code calls torch's checkpoint, in place of the function that transformers sets",
        fix="leave out --offload-activations",
        see=SEE,
    )


def _set_in(part: Any, *, wanted: bool | None, every: int, offload: bool, allow_reentrant: bool) -> list[str]:
    name, is_on = type(part).__name__, is_checkpointing(part)
    if wanted is False or not (wanted or is_on):
        if not is_on:
            return []
        disable_checkpointing(part)
        return [f"gradient checkpointing is off in {name}; the script had it on"]
    check_every(part, every)
    notes = []
    is_new = offload and not (is_on and is_offloaded(part))
    if is_new:
        check_offload(part)
        offload_checkpoints(part)
    if not is_on:
        enable_checkpointing(part, use_reentrant=False)
        place = ", with the inputs of its blocks in host memory" if offload else ""
        notes.append(f"gradient checkpointing is on in {name}{place}")
    elif is_new:
        notes.append(f"gradient checkpointing of {name} stores inputs of blocks in host memory")
    if is_on and not allow_reentrant and is_reentrant(part):
        make_not_reentrant(part)
        notes.append(f"gradient checkpointing in {name} has use_reentrant=False; the script says True")
    if every > 1:
        num_on, num_blocks = checkpoint_every(part, every)
        notes.append(f"gradient checkpointing recomputes {num_on} of {num_blocks} blocks of {name}")
    return notes


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
