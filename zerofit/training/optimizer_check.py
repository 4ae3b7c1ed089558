"""Refuses, inside the run, an optimizer that the plan's offload would swap or break.

Before the launch the source alone is known, and what it shows is never certain; here the optimizer is there.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zerofit.checking.engine import check
from zerofit.checking.inputs.optimizer import optimizer_of_class
from zerofit.checking.inputs.strategy import situation_of_strategy
from zerofit.checking.rule import Severity
from zerofit.checking.rules.optimizer.rules import RULES
from zerofit.core.setting import Said

if TYPE_CHECKING:
    from zerofit.core.plan import Plan
    from zerofit.training.changes import Changes


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
                check_optimizer(optimizer, plan, changes)
        return original(self, *objects, **kwargs)

    accelerator_class.prepare = prepare


def check_optimizer(optimizer: Any, plan: Plan, changes: Changes) -> None:
    """Print what the rules warn of, where this optimizer trains under the plan.

    Raises:
        UserError: they say that it can't work.
    """
    name = type(optimizer).__name__
    if getattr(getattr(optimizer, "args", None), "optim_bits", None) == 8 and not name.endswith("8bit"):
        name += "8bit"  # bitsandbytes' AdamW(optim_bits=8), as Trainer makes it
    situation = situation_of_strategy(plan.strategy, topology=plan.topology, versions=plan.versions)
    said = Said(value=optimizer_of_class(f"{type(optimizer).__module__}.{name}"), text=f"the script's {name}")
    situation = replace(situation, settings=replace(situation.settings, optimizer=said))
    verdict = check(situation, rules=RULES)
    for finding in verdict.of(Severity.WARNING):
        changes.warn(finding.as_text())
    for finding in verdict.of(Severity.ERROR):
        raise finding.as_error()
