"""FSDP2's weights and gradients in a script's hands: DTensors that read and write as whole tensors do.

Where they can't, torch fails, and its message is completed by the line of the script and what to do.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from zerofit.core.errors import UserError, message_of
from zerofit.core.upstream.fsdp2 import complete_scalars, draw_whole, keep_assigned_data, refuse_hooks
from zerofit.training.step.deepspeed.placeholders import script_place

if TYPE_CHECKING:
    from types import ModuleType

    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings

_OF_SHARDS = re.compile(
    r"\bDTensor|tensor subclasses|sharding strategy|sharded dimension|fully_shard|unsharded"
    r"|out of bounds for storage of size 0|FSDP does not support"
)
"""In torch's messages about tensors that ranks hold in parts (torch/distributed/tensor, 2.13)."""


def install(module: ModuleType, settings: AppliedSettings, changes: Changes) -> None:
    """Make numbers that a script reads from sharded tensors complete, and data that it assigns count.

    Args:
        module: torch.distributed.tensor.
    """
    if settings.uses_fsdp2:
        complete_scalars(module)
        keep_assigned_data(module)
        draw_whole(module)
        refuse_hooks(module, gradient_hook)


def gradient_hook(name: str = "a parameter") -> UserError:
    """Return the error for a hook on a parameter's gradient."""
    return UserError(
        "gradient-hook-under-fsdp2",
        "a hook on a parameter's gradient would never be called under FSDP2",
        found=f"register_hook() or register_post_accumulate_grad_hook() of {name}",
        why="autograd computes gradients of gathered weights, which are other tensors than the parameters",
        fix="edit gradients between accelerator.backward() and optimizer.step(), or train without FSDP2: "
        "--engine native",
    )


def sharded_tensor_error(failure: BaseException) -> UserError | None:
    """Return the error for a failure of an operator that has no rule for FSDP2's shards; None for others."""
    kinds = (RuntimeError, NotImplementedError, ValueError, AttributeError, AssertionError)
    if not isinstance(failure, kinds) or not _OF_SHARDS.search(message_of(failure)):
        return None
    message = message_of(failure).partition("\n")[0]
    return UserError(
        "weight-sharded-by-fsdp2",
        "the script works with a weight that FSDP2 holds in shards",
        found=f"{script_place(failure)}: {type(failure).__name__}: {message}",
        why="outside of the model's own pass each rank holds a part of each weight, a DTensor, which few "
        "functions can take beside plain tensors",
        fix="read whole weights by accelerator.get_state_dict(model) or weight.full_tensor(), on all ranks, "
        "or train without FSDP2: --engine native",
        see="https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html",
        exit_code=1,
    )
