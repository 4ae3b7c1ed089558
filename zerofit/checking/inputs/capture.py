"""Facts from a capture that replace those from source and arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.checking.inputs.accelerate import precision_of
from zerofit.checking.situation import DEFAULTS, TrainerSettings
from zerofit.core.command import Route
from zerofit.core.optimizers.lookup import optimizer_of_class
from zerofit.core.setting import Confidence, Said
from zerofit.scripts.facts import Action, Keyword, Plain

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from zerofit.checking.situation import RunSettings, Situation
    from zerofit.core.capture import Capture
    from zerofit.core.strategy import Precision
    from zerofit.scripts.facts import ScriptFacts

_LAUNCH_FIELDS = frozenset({"deepspeed", "fsdp", "fsdp_config", "local_rank", "use_cpu", "no_cuda"})
"""Fields of TrainingArguments that differ between a capture, one process without a GPU, and the run."""


def with_capture(situation: Situation, capture: Capture, *, is_launched: bool = False) -> Situation:
    """Return the situation with the script's facts replaced by the capture's, which are certain.

    Settings of a DeepSpeed file or zerofit's flags are kept.

    Args:
        situation: from the script's source.
        capture: of the script.
        is_launched: whether zerofit launches it, and so keeps unprepared models whole.
    """
    trainer, script = situation.trainer, situation.script
    if script is not None and is_launched and capture.models_left_whole:
        calls = tuple(replace(call, is_outside_engine=False) for call in script.calls)
        script = replace(script, calls=calls)
    if capture.route is Route.TRAINER:
        known = trainer or TrainerSettings()
        said = {**known.said, **dict(_fields(known, capture))}
        trainer = replace(known, said=said, unread=frozenset(), is_complete=True)
    settings = replace(situation.settings, optimizer=_optimizer(situation, capture))
    settings = replace(settings, precision=_precision(replace(situation, trainer=trainer), settings, capture))
    return replace(
        situation,
        route=capture.route,
        trainer=trainer,
        settings=settings,
        capture=capture,
        script=None if script is None else _script(script, capture),
    )


def _optimizer(situation: Situation, capture: Capture) -> Said[str | None] | None:
    known, made = situation.settings.optimizer, capture.optimizer
    is_of_plan = situation.strategy is not None and situation.strategy.optimizer is not None
    is_of_file = situation.deepspeed is not None and situation.deepspeed.at("optimizer", "type") is not None
    if made is None or is_of_plan or is_of_file:
        return known
    value = optimizer_of_class(made.class_path)
    if known is not None and known.value == value:
        return replace(known, confidence=Confidence.CERTAIN)
    return Said(value=value, text=f"the script's {made.class_path.rpartition('.')[2]}")


def _fields(known: TrainerSettings, capture: Capture) -> Iterator[tuple[str, Said[Any]]]:
    for name, value in capture.trainer_arguments.items():
        before = known.said.get(name)
        if name in _LAUNCH_FIELDS:
            continue
        if before is not None and before.value == value:
            yield name, replace(before, confidence=Confidence.CERTAIN)
        elif before is not None or name in known.unread or DEFAULTS.get(name, value) != value:
            place = before.place if before is not None else None
            yield name, Said(value=value, text=f"TrainingArguments.{name}={value}", place=place)


def _precision(
    situation: Situation, settings: RunSettings, capture: Capture
) -> Said[Precision | None] | None:
    if situation.deepspeed is not None:
        trainer = situation.trainer if capture.route is Route.TRAINER else None
        said = _captured_precision(capture)
        launch = said if said.value is not None else settings.precision
        return precision_of(situation.deepspeed, launch=launch, trainer=trainer)
    if settings.precision is None or (capture.precision is not None and not situation.is_from_flags):
        return _captured_precision(capture)
    return settings.precision


def _captured_precision(capture: Capture) -> Said[Precision | None]:
    return Said(value=capture.precision, text=f"the script's mixed_precision={capture.mixed_precision}")


def _script(script: ScriptFacts, capture: Capture) -> ScriptFacts:
    """Return the source's facts with Accelerator()'s keywords as observed."""
    made = script.find(Action.MAKE_ACCELERATOR)
    if capture.route is not Route.ACCELERATE or not made:
        return replace(script, route=capture.route)
    values: dict[str, Plain] = {
        "gradient_accumulation_steps": capture.gradient_accumulation_steps,
        "mixed_precision": capture.mixed_precision,
    }
    defaults = {"gradient_accumulation_steps": 1, "mixed_precision": "no"}
    certain = Confidence.CERTAIN
    keywords = [keyword for keyword in script.accelerator_keywords if keyword.name not in values]
    keywords += [
        replace(keyword, confidence=certain)
        for keyword in script.accelerator_keywords
        if values.get(keyword.name) == keyword.value
    ]
    read = {keyword.name for keyword in keywords}
    keywords += [
        Keyword(
            name=name,
            value=value,
            text=f"{name}={value!r}",
            place=made[0].seen.place,
            confidence=certain,
        )
        for name, value in values.items()
        if name not in read and value != defaults[name]
    ]
    return replace(script, route=capture.route, accelerator_keywords=tuple(keywords))
