"""Applies a plan to an unmodified script, by hooks set when it imports accelerate or transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.runtime import (
    accelerate_hooks,
    backward,
    checkpointing,
    clipping,
    deepspeed_step,
    join_prepare,
    micro_batches,
    optimizer_check,
    optimizer_swap,
    trainer_hooks,
)
from zerofit.runtime.on_import import when_imported
from zerofit.runtime.settings import settings_of

if TYPE_CHECKING:
    from types import ModuleType

    from zerofit.capture import Capture
    from zerofit.plan import Plan
    from zerofit.runtime.changes import Changes


def install(plan: Plan, changes: Changes, *, capture: Capture | None = None) -> None:
    """Set the hooks that make the script train as the plan says.

    Args:
        plan: what runs.
        changes: where to note what was changed.
        capture: what the script trains; None where it was not captured.
    """
    settings = settings_of(plan, capture)
    forced = settings.gradient_clipping

    def hook_accelerator(module: ModuleType) -> None:
        accelerate_hooks.install(module, settings, changes)
        clipping.install(module, changes, forced=forced)
        for part in (backward, micro_batches, checkpointing, optimizer_swap, join_prepare):
            part.install(module.Accelerator, settings, changes)  # the last one's prepare() is the outermost
        if settings.uses_deepspeed:
            deepspeed_step.hook_ends(module.Accelerator)
        if settings.uses_deepspeed and plan.is_checked:
            optimizer_check.install(module.Accelerator, plan, changes)

    if settings.uses_deepspeed:
        if settings.on_cpu:
            when_imported("accelerate.state", accelerate_hooks.default_to_gloo)
        when_imported("accelerate.utils.deepspeed", deepspeed_step.install)
        when_imported(
            "torch.nn.utils",
            lambda module: deepspeed_step.hook_torch_clipping(module, changes, forced=forced),
        )
    when_imported("accelerate.accelerator", hook_accelerator)
    when_imported(
        "transformers.training_args", lambda module: trainer_hooks.install(module, settings, changes)
    )
