"""`zerofit launch` to a Situation: the plan's strategy and the script that it will train."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.documents import Unreadable
from zerofit.layers.of_script import trainer_of
from zerofit.layers.of_strategy import situation_of_strategy
from zerofit.layers.optimizer import optimizer_of

if TYPE_CHECKING:
    from zerofit.compat.situation import Situation
    from zerofit.facts import Machine
    from zerofit.plan import Plan
    from zerofit.targets import Targets


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
        from zerofit.script_reading.read import read_script

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
