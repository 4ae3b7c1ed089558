"""Rules on scripts: schedulers of the learning rate that an Accelerator prepares."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.checking.inputs.script_arguments import given_argument, is_on
from zerofit.checking.rule import ACCELERATE, DIFFERS, Rule, Severity, declared
from zerofit.checking.rules.script.hits import hit
from zerofit.checking.situation import known
from zerofit.core.command import Route
from zerofit.scripts.facts import ScheduleFault

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.rule import Hit
    from zerofit.checking.situation import Situation


_DUMMY = "DummyScheduler("
"""accelerate's, which stands for the scheduler of the DeepSpeed file."""
_TOTAL = ("scheduler", "params", "total_num_steps")
_CONSTANT = "constant"
"""The beginning of the kinds of schedules without an end."""
_UNPREPARED = "a DataLoader that is not prepared yet has the batches of all ranks"
_WHY = {
    ScheduleFault.OF_ONE_RANK: "it reaches its end after a part of the steps: a prepared DataLoader has the "
    "batches of one rank, and accelerate steps the scheduler once for each rank",
    ScheduleFault.OF_THE_LOOP: "it reaches its end after a part of the steps: the loop counts the steps of "
    "one rank, and accelerate steps the scheduler once for each rank",
    ScheduleFault.PER_EPOCH: "it is stepped once an epoch, and each call steps it once for each rank",
    ScheduleFault.DIVIDED: f"it reaches its end after a part of the steps: {_UNPREPARED}",
    ScheduleFault.MULTIPLIED: f"it never reaches its end: {_UNPREPARED}",
}
_FIX = {
    ScheduleFault.OF_MICRO_BATCHES: "multiply by accelerator.num_processes, not by accumulation steps",
    ScheduleFault.PER_EPOCH: "do not prepare it, or multiply its epochs by accelerator.num_processes",
    ScheduleFault.DIVIDED: "leave the division by the number of ranks out",
    ScheduleFault.MULTIPLIED: "leave the number of ranks out, or take len() of the prepared DataLoader",
}


@Rule(
    id="prepared-scheduler-steps-per-rank",
    severity=Severity.ERROR,
    summary="a prepared scheduler takes num_processes steps in each optimizer step",
    why="accelerate steps it once for each rank, so it has to be made for the steps of all ranks together",
    fix="multiply its number of steps by accelerator.num_processes, or do not prepare it",
    see=f"{ACCELERATE}/scheduler.py",
    evidence=DIFFERS,
)
def _counts_one_rank(situation: Situation) -> Iterator[Hit]:
    script = situation.script
    if script is None or script.route is not Route.ACCELERATE:
        return
    for schedule in script.schedules:
        given = given_argument(situation, schedule.argument) if schedule.argument else None
        if schedule.argument is not None and (given is None or not is_on(given)):
            continue  # the script then counts the steps itself
        if _DUMMY in schedule.made.text and situation.file.value(*_TOTAL) != "auto":
            continue  # the file's scheduler does not take the number
        kind = given_argument(situation, schedule.kind_argument) if schedule.kind_argument else None
        if kind is not None and str(kind.value).startswith(_CONSTANT):
            continue
        if known(situation.topology, "the number of ranks").world_size > 1:
            behind = f" with {schedule.steps}" if schedule.steps not in schedule.made.text else ""
            found = hit(schedule.made, behind)
            yield replace(found, why=_WHY.get(schedule.fault), fix=_FIX.get(schedule.fault))


RULES = declared(vars())
