"""`zerofit launch` to a Situation: the plan's strategy and the script that it will train."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.checking.inputs.optimizer import optimizer_of
from zerofit.checking.inputs.strategy import situation_of_strategy
from zerofit.checking.inputs.training_arguments import trainer_of
from zerofit.configs.text import Unreadable

if TYPE_CHECKING:
    from zerofit.checking.situation import Situation
    from zerofit.checking.targets import Targets
    from zerofit.core.facts import Machine
    from zerofit.core.plan import Plan


def situation_of_launch(plan: Plan, *, machine: Machine | None, targets: Targets) -> Situation:
    """Return what a plan and a script come to together.

    Args:
        plan: what will run.
        machine: the node that runs it.
        targets: the script and its arguments; without a script, what a module does stays unknown.
    """
    situation = situation_of_strategy(
        plan.strategy, topology=plan.topology, machine=machine, versions=plan.versions
    )
    script = None
    if targets.scripts:
        from zerofit.scripts.source.read_script import read_script

        ((name, source),) = targets.scripts
        try:
            script = read_script(source, name=name)
        except Unreadable:
            script = None  # Python itself will say what is wrong
    route = script.route if script else None
    trainer = trainer_of(script, route, targets)
    settings = situation.settings
    if settings.optimizer is None:
        settings = replace(settings, optimizer=optimizer_of(None, trainer, script))
    return replace(
        situation,
        settings=settings,
        route=route,
        script=script,
        trainer=trainer,
        checkpoint=targets.checkpoint,
        schemas=targets.schemas,
    )
