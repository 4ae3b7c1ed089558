"""Rule on TRL's GRPOConfig and RLOOConfig: batches hold whole groups of generations."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zerofit.checking.rule import Hit, Rule, Severity, declared, fails, hit_of
from zerofit.checking.rules.script.hits import hit, least
from zerofit.core.command import Launcher
from zerofit.core.setting import Confidence, Said
from zerofit.scripts.facts import Action

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from zerofit.checking.situation import Situation
    from zerofit.scripts.facts import ScriptCall, ScriptFacts

_SOURCE = "https://github.com/huggingface/trl/blob/v1.16.0/trl/trainer/grpo_config.py"
_GENERATIONS = {"GRPO": 8, "RLOO": 2}
"""Defaults of num_generations (trl 1.16, trl/trainer/grpo_config.py and rloo_config.py)."""
_DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": None,
    "generation_batch_size": None,
    "num_generations_eval": None,
    "eval_strategy": "no",
}
"""Of the same files, and of transformers/training_args.py."""
_CONFIG = re.compile(r"(?:\w+\.)*(GRPO|RLOO)Config\(")
_TRAINER = re.compile(r"(?:\w+\.)*(GRPO|RLOO)Trainer\(")
_FORMER = {"rloo_k", "num_sample_generations", "**"}
"""Arguments of the RLOOConfig before trl 0.22, which counts otherwise; and unknown ones."""


@Rule(
    id="generation-batch-holds-whole-groups",
    severity=Severity.ERROR,
    summary="TRL's generation batch must be a multiple of num_generations",
    why="advantages compare all generations of a prompt, so TRL refuses a batch with a part of them",
    fix="change num_generations, the batch size or the accumulation steps, so that it divides their product",
    see=_SOURCE,
    evidence=fails("must be divisible by num_generations"),
)
def _breaks_groups(situation: Situation) -> Iterator[Hit]:
    script, ranks = situation.script, _world_size(situation)
    found = _settings(situation, script) if script is not None and ranks is not None else None
    if found is None or ranks is None:
        return
    call, settings = found
    alone = settings["num_generations"]
    if alone is not None and alone.value == 1:
        why = "an advantage compares the generations of a prompt, so TRL refuses one alone"
        yield hit_of(alone, why=why, fix="set num_generations to 2 or more")
    for size, texts, group in (_training(settings, ranks), _evaluation(settings, ranks)):
        if size is None or group is None or not isinstance(group.value, int) or group.value < 1:
            continue
        if size % group.value:
            confidence = least(group.confidence, *(text.confidence for text in texts))
            factors = ", ".join(dict.fromkeys(text.text for text in texts))
            on = f"{ranks} rank{'s' * (ranks > 1)}"
            place = group.place or call.seen.place
            text = f"{group.text} with {factors} on {on}: {size} is no multiple of {group.value}"
            yield replace(hit(call.seen, confidence=confidence), found=text, place=place)


def _world_size(situation: Situation) -> int | None:
    if situation.topology is not None:
        return situation.topology.world_size
    command = situation.command
    return 1 if command is not None and command.launcher is Launcher.PYTHON else None


def _settings(
    situation: Situation, script: ScriptFacts
) -> tuple[ScriptCall, Mapping[str, Said[Any] | None]] | None:
    """Return the call that makes the config or Trainer, and its fields; None if some may be elsewhere.

    A field that is given, but whose value the source does not show, is None.
    """
    made = script.find(Action.MAKE_ARGUMENTS)
    trainers = script.find(Action.MAKE_TRAINER)
    names = {*_DEFAULTS, "num_generations"}
    if len(made) == 1 and (match := _CONFIG.match(made[0].seen.text)):
        (call,) = made
        if call.given & _FORMER:
            return None
        sure = Confidence.LIKELY if call.is_conditional or call.loop else Confidence.CERTAIN
        said = {keyword.name: keyword.said for keyword in script.training_arguments}
        given = call.given
    elif not made and len(trainers) == 1 and (match := _TRAINER.match(trainers[0].seen.text)):
        (call,) = trainers
        said = dict(situation.arguments.said)
        if not script.find(Action.PARSE_ARGUMENTS) or "config" in said:
            return None
        sure, given = Confidence.LIKELY, frozenset(said)
    else:
        return None
    defaults = {**_DEFAULTS, "num_generations": _GENERATIONS[match[1]]}
    return call, {name: _field(name, said, given, defaults[name], sure) for name in names}


def _field(
    name: str, said: Mapping[str, Said[Any]], given: frozenset[str], default: Any, confidence: Confidence
) -> Said[Any] | None:
    if name not in given:
        return Said(value=default, text=f"{name}={default} by default", confidence=confidence)
    found = said.get(name)
    if found is None or not isinstance(found.value, str) or not found.value.isdigit():
        return found
    return replace(found, value=int(found.value))


def _training(
    settings: Mapping[str, Said[Any] | None], ranks: int
) -> tuple[int | None, tuple[Said[Any], ...], Said[Any] | None]:
    """Return the generation batch, its factors, and the generations of a prompt."""
    group = settings["num_generations"]
    whole, steps = settings["generation_batch_size"], settings["steps_per_generation"]
    if whole is None or steps is None:
        return None, (), None
    if whole.value is not None:
        is_number = type(whole.value) is int and steps.value is None
        return (whole.value, (whole,), group) if is_number else (None, (), None)
    size = settings["per_device_train_batch_size"]
    factor = settings["gradient_accumulation_steps"] if steps.value is None else steps
    if size is None or factor is None or type(size.value) is not int or type(factor.value) is not int:
        return None, (), None
    return size.value * factor.value * ranks, (size, factor), group


def _evaluation(
    settings: Mapping[str, Said[Any] | None], ranks: int
) -> tuple[int | None, tuple[Said[Any], ...], Said[Any] | None]:
    """Return the batch of an evaluation on all ranks, its factor, and the generations of a prompt."""
    strategy, size = settings["eval_strategy"], settings["per_device_eval_batch_size"]
    own = settings["num_generations_eval"]
    group = own if own is None or own.value is not None else settings["num_generations"]
    if strategy is None or strategy.value not in ("steps", "epoch") or size is None or group is None:
        return None, (), None
    return (size.value * ranks if type(size.value) is int else None), (size, strategy), group


RULES = declared(vars())
