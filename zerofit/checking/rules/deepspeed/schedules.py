"""Rules on the learning rate schedules of ds_config.json."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.checking.inputs.accelerate import finite_number
from zerofit.checking.inputs.script_arguments import given_argument
from zerofit.checking.rule import ACCELERATE, DEEPSPEED, Rule, Severity, declared, fails, hit_at, ignored
from zerofit.checking.rules.script.hits import prepared_beside_section
from zerofit.checking.situation import known
from zerofit.configs.document import SetValue, say
from zerofit.core.command import Route
from zerofit.core.setting import Confidence, Said
from zerofit.core.supported import release_of
from zerofit.scripts.facts import Action

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.rule import Hit
    from zerofit.checking.situation import Situation
    from zerofit.configs.document import Document


_DEFAULT_RATE = 0.001
_UNTIL: dict[str, tuple[int, ...] | None] = {"WarmupDecayLR": None, "WarmupLR": (0, 17, 2)}
"""Schedulers with this default, and the release of DeepSpeed that took the optimizer's rate in its place."""
_OPTIMIZERS = ("optimizer", "params", "lr")
_SCHEDULERS = ("scheduler", "params", "warmup_max_lr")
_TYPE = ("scheduler", "type")
_ARGUMENTS = ("learning_rate", "lr")


@Rule(
    id="warmup-max-lr-missing",
    severity=Severity.ERROR,
    summary=f"without warmup_max_lr the scheduler trains at a learning rate of {_DEFAULT_RATE}",
    why=f"the scheduler sets the rate of each step, up to warmup_max_lr, which is {_DEFAULT_RATE} by default",
    fix="set scheduler.params.warmup_max_lr to the learning rate",
    see=f"{DEEPSPEED}/runtime/lr_schedules.py",
    evidence=ignored(("engine.lr_scheduler.max_lrs", [_DEFAULT_RATE])),
)
def _rate_replaced(situation: Situation) -> Iterator[Hit]:
    file = situation.file
    if not _has_default_rate(situation, file) or file.at(*_SCHEDULERS) is not None:
        return
    rate = known(_learning_rate(situation, file), "the learning rate")
    number = finite_number(rate.value)
    if number is None or number == _DEFAULT_RATE:
        return
    is_filled_in = situation.route is Route.TRAINER and file.value(*_OPTIMIZERS) in (None, "auto")
    edit = SetValue(document=file.name, path=_SCHEDULERS, value="auto" if is_filled_in else number)
    # Scripts that pass their configuration to DeepSpeed themselves often complete it first.
    may_change = situation.route in (None, Route.NATIVE)
    yield hit_at(
        file,
        ("scheduler",),
        found=f"{say(file, 'scheduler', 'type')} without warmup_max_lr, with {rate.text}",
        fix=f"write {'.'.join(_SCHEDULERS)}: {json.dumps(edit.value)}",
        edits=(edit,),
        confidence=Confidence.LIKELY if may_change else rate.confidence,
    )


def _has_default_rate(situation: Situation, file: Document) -> bool:
    """Return True if the file's scheduler takes the default where warmup_max_lr is missing."""
    kind = file.value("scheduler", "type")
    if not isinstance(kind, str) or kind not in _UNTIL:
        return False
    makes = situation.script.find(Action.INITIALIZE) if situation.script else ()
    if any(call.given & {"lr_scheduler", "**"} for call in makes):
        return False  # the file's is not used
    until = _UNTIL[kind]
    if until is None:
        return True
    version = known(situation.versions, "the version of deepspeed that will run").deepspeed
    return release_of(known(version, "the version of deepspeed that will run")) < until


def _learning_rate(situation: Situation, file: Document) -> Said[object] | None:
    """Return the rate that the file, the TrainingArguments or a script's argument ask for."""
    said = file.said(*_OPTIMIZERS)
    if said is not None and said.value != "auto":
        return said
    if situation.route is Route.TRAINER:
        return situation.arguments.find_or_default("learning_rate")
    if said is None and file.at("optimizer") is not None:
        return Said(value=_DEFAULT_RATE, text="the optimizer's default")
    said = given_argument(situation, *_ARGUMENTS)
    return None if said is None else replace(said, confidence=Confidence.LIKELY)


@Rule(
    id="two-schedulers",
    severity=Severity.ERROR,
    summary="the script prepares a scheduler, and the DeepSpeed file defines one",
    why="prepare() accepts only one of them",
    fix="use accelerate.utils.DummyScheduler in the script, or remove the scheduler section",
    see=f"{ACCELERATE}/accelerator.py",
    evidence=fails("You cannot specify a scheduler in the config file and in the code"),
)
def _section_and_script(situation: Situation) -> Iterator[Hit]:
    file, script = situation.file, situation.script
    if script is None or situation.route is not Route.ACCELERATE or file.at("scheduler") is None:
        return
    path = _TYPE if file.at(*_TYPE) is not None else _TYPE[:1]
    chooses = bool(script.find(Action.MAKE_DUMMY_SCHEDULER))
    for made, confidence in prepared_beside_section(script, is_scheduler=True):
        if confidence is Confidence.CERTAIN or not chooses:
            found = f"{made.text} ({made.place}) with {say(file, *path)} in {file.name}"
            yield hit_at(file, path, found=found, confidence=confidence)


RULES = declared(vars())
