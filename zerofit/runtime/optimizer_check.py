"""Refuses, inside the run, an optimizer that the plan's offload would swap or break.

Before the launch the source alone is known, and what it shows is never certain; here the optimizer is there.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zerofit.compat.engine import check
from zerofit.compat.optimizers import OPTIMIZER_RULES
from zerofit.compat.rule import Severity
from zerofit.layers.of_strategy import situation_of_strategy
from zerofit.layers.optimizer_ids import optimizer_of_class
from zerofit.said import Said

if TYPE_CHECKING:
    from zerofit.plan import Plan
    from zerofit.runtime.changes import Changes


def install(accelerator_class: Any, plan: Plan, changes: Changes) -> None:
    """Hook Accelerator.prepare, which Trainer calls too.

    Args:
        accelerator_class: accelerate's Accelerator.
        plan: what runs.
        changes: where warnings go.
    """
    original = accelerator_class.prepare

    @functools.wraps(original)
    def prepare(self: Any, *objects: Any, **kwargs: Any) -> Any:
        from torch.optim import Optimizer

        for optimizer in objects:
            if isinstance(optimizer, Optimizer):
                check_optimizer(type(optimizer), plan, changes)
        return original(self, *objects, **kwargs)

    accelerator_class.prepare = prepare


def check_optimizer(optimizer_class: type, plan: Plan, changes: Changes) -> None:
    """Print what the rules warn of, where an optimizer of this class trains under the plan.

    Raises:
        UserError: they say that it can't work.
    """
    path = f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"
    situation = situation_of_strategy(plan.strategy, topology=plan.topology, versions=plan.versions)
    optimizer = Said(value=optimizer_of_class(path), text=f"the script's {optimizer_class.__name__}")
    situation = replace(situation, settings=replace(situation.settings, optimizer=optimizer))
    verdict = check(situation, rules=OPTIMIZER_RULES)
    for finding in verdict.of(Severity.WARNING):
        changes.warn(finding.as_text())
    for finding in verdict.of(Severity.ERROR):
        raise finding.as_error()
