"""Applies a plan to an unmodified script, by hooks set when it imports accelerate or transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.runtime import accelerate_hooks, deepspeed_step, trainer_hooks
from zerofit.runtime.on_import import when_imported
from zerofit.runtime.settings import settings_of
from zerofit.strategy import Engine

if TYPE_CHECKING:
    from zerofit.plan import Plan
    from zerofit.runtime.changes import Changes


def install(plan: Plan, changes: Changes) -> None:
    """Set the hooks that make the script train as the plan says."""
    settings = settings_of(plan)
    if plan.strategy.engine is Engine.DEEPSPEED:
        if plan.topology.on_cpu:
            when_imported("accelerate.state", accelerate_hooks.default_to_gloo)
        when_imported("accelerate.utils.deepspeed", deepspeed_step.defer_step)
    when_imported(
        "accelerate.accelerator",
        lambda module: accelerate_hooks.install(module, settings, changes),
    )
    when_imported(
        "transformers.training_args",
        lambda module: trainer_hooks.install(module, settings, changes, on_cpu=plan.topology.on_cpu),
    )
