"""Applies a plan to an unmodified script, by hooks set when it imports accelerate or transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.core.strategy import ZeroStage
from zerofit.core.upstream.deepspeed import wait_for_every_gather
from zerofit.generation.ranks.meeting import watch
from zerofit.scripts.on_import import when_imported
from zerofit.training import (
    accelerate_hooks,
    backward,
    changed_model,
    clipping,
    compiled_model,
    generate_hooks,
    grouped_batches,
    micro_batches,
    optimizer_check,
    optimizer_swap,
    quantized_loading,
    torch_clipping,
)
from zerofit.training.deepspeed import (
    deepspeed_step,
    join_prepare,
    partitioned_embeddings,
    partitioned_ties,
    skipped_steps,
)
from zerofit.training.settings import settings_of
from zerofit.training.trainer import trainer_hooks

if TYPE_CHECKING:
    from types import ModuleType

    from zerofit.core.plan import Plan
    from zerofit.training.changes import Changes
    from zerofit.training.settings import Settings


def install(plan: Plan, changes: Changes) -> None:
    """Set the hooks that make the script train as the plan says.

    Args:
        plan: what runs.
        changes: where to note what was changed.
    """
    settings = settings_of(plan)

    def hook_accelerator(module: ModuleType) -> None:
        hook_accelerator_class(module.Accelerator, plan, settings, changes)

    if settings.uses_deepspeed and settings.on_cpu:
        when_imported("accelerate.state", accelerate_hooks.default_to_gloo)
        when_imported("deepspeed.runtime.zero.partition_parameters", wait_for_every_gather)
    when_imported(
        "torch.nn.utils",
        lambda module: torch_clipping.install(module, changes, forced=settings.gradient_clipping),
    )
    when_imported(
        "transformers.modeling_utils",
        lambda module: _hook_models(module, plan, settings, changes),
    )
    if plan.topology.world_size > 1:
        if plan.generate_limit_s:
            watch()
        when_imported(
            "transformers.generation.utils",
            lambda module: generate_hooks.install(module, changes, limit_s=plan.generate_limit_s),
        )
    when_imported("accelerate.accelerator", hook_accelerator)
    when_imported(
        "transformers.training_args", lambda module: trainer_hooks.install(module, settings, changes)
    )


def _hook_models(module: ModuleType, plan: Plan, settings: Settings, changes: Changes) -> None:
    model_class = module.PreTrainedModel
    captured = plan.capture.model if plan.capture is not None else None
    is_partitioned = plan.strategy.zero_stage is ZeroStage.PARAMETERS
    if is_partitioned:
        partitioned_embeddings.install(model_class, changes, captured=captured)
        partitioned_ties.install(module, changes)
    quantized_loading.install(
        model_class, settings, changes, captured=captured, partitions_parameters=is_partitioned
    )


def hook_accelerator_class(accelerator_class: Any, plan: Plan, settings: Settings, changes: Changes) -> None:
    """Set the hooks of one class: accelerate's Accelerator, or a subclass of its own.

    Args:
        accelerator_class: the class; its methods are replaced.
        plan: what runs.
        settings: what of the plan reaches the script.
        changes: where to note what was changed.
    """
    # Each prepare() stands around the one before: the last hook is the first to see what a script prepares.
    accelerate_hooks.install(accelerator_class, settings, changes)
    if plan.strategy.compile:
        compiled_model.install(accelerator_class)
    micro_batches.install(accelerator_class, settings, changes)
    if settings.uses_deepspeed and plan.is_checked:
        optimizer_check.install(accelerator_class, plan, changes)
    for part in (optimizer_swap, join_prepare, backward, grouped_batches):
        part.install(accelerator_class, settings, changes)
    torch_clipping.watch(accelerator_class)
    skipped_steps.install(accelerator_class, changes)
    clipping.install(accelerator_class, changes, forced=settings.gradient_clipping)
    if settings.uses_deepspeed:
        deepspeed_step.hook_ends(accelerator_class)
    captured = plan.capture.model if plan.capture is not None else None
    changed_model.install(accelerator_class, settings, changes, captured=captured)
