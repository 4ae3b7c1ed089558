"""Rules on scripts: gradients that are deleted too early, or that no GradScaler takes, without DeepSpeed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.checking.inputs.accelerate import launch_of, launch_value
from zerofit.checking.rule import ACCELERATE, DIFFERS, Hit, Rule, Severity, declared, fails
from zerofit.checking.rules.script.hits import hit, is_without_deepspeed, least
from zerofit.core.command import Route
from zerofit.core.setting import Confidence, Said
from zerofit.core.strategy import Precision
from zerofit.scripts.facts import Action

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.situation import Situation
    from zerofit.scripts.facts import Keyword, ScriptCall, ScriptFacts

_STEPS = ("gradient_accumulation_steps", "plugin.num_steps")
_SHARDING = ("FSDP", "MEGATRON_LM", "XLA", "TPU")
"""Values of distributed_type whose engine scales gradients itself: FSDP's ShardedGradScaler takes fp16."""
_SHARDING_FLAGS = ("use_fsdp", "use_megatron_lm", "tpu")


@Rule(
    id="zero-grad-before-backward",
    severity=Severity.ERROR,
    summary="zero_grad() before backward() deletes what accumulate() has accumulated",
    why="accelerate skips zero_grad() except in the micro-batch that steps, and there it deletes the "
    "gradients of the others: only the last one trains",
    fix="call zero_grad() behind optimizer.step()",
    see=f"{ACCELERATE}/optimizer.py",
    evidence=DIFFERS,
)
def _clears_in_accumulate(situation: Situation) -> Iterator[Hit]:
    script = situation.script
    steps = _steps(script) if script else None
    if script is None or steps is None or not is_without_deepspeed(situation):
        return
    for call in script.find(Action.ZERO_GRAD):
        if call.clears is not None and call.clears.step is None and not call.is_engine_checked:
            behind = f" before {call.clears.backward.text}, with {steps.text}"
            yield hit(call.seen, behind, least(call.clears.confidence, steps.confidence))


def _steps(script: ScriptFacts) -> Keyword | None:
    """Return the argument of Accelerator() that asks for accumulation; None if none certainly does."""
    for keyword in script.accelerator_keywords:
        if keyword.name in _STEPS and type(keyword.value) is int and keyword.value > 1:
            return keyword
    return None


@Rule(
    id="accumulation-given-twice",
    severity=Severity.ERROR,
    summary="Accelerator() takes gradient_accumulation_steps or a plugin with them, not both",
    why="the plugin has a number of steps of its own, so accelerate refuses another",
    fix="leave gradient_accumulation_steps out, and set num_steps of the plugin",
    see=f"{ACCELERATE}/accelerator.py",
    evidence=fails(
        "You can only pass one of `gradient_accumulation_steps` and `gradient_accumulation_plugin`"
    ),
)
def _given_twice(situation: Situation) -> Iterator[Hit]:
    script = situation.script
    keywords = script.accelerator_keywords if script else ()
    steps = next((word for word in keywords if word.name == "gradient_accumulation_steps"), None)
    for call in script.find(Action.MAKE_ACCELERATOR) if script else ():
        is_given = (
            "gradient_accumulation_plugin" in call.given and "gradient_accumulation_steps" in call.given
        )
        plugin = call.keyword("gradient_accumulation_plugin")
        is_none = plugin is not None and plugin.value is None
        if is_given and not is_none and steps is not None and type(steps.value) is int and steps.value != 1:
            confidence = Confidence.LIKELY if call.is_conditional else steps.confidence
            yield Hit(found=call.seen.text, place=call.seen.place, confidence=confidence)


@Rule(
    id="zero-grad-in-each-micro-batch",
    severity=Severity.ERROR,
    summary="zero_grad() in each micro-batch leaves nothing to accumulate",
    why="it deletes the gradients of earlier micro-batches: only the last one before each step trains",
    fix="call zero_grad() where the optimizer steps, behind step()",
    see="https://docs.pytorch.org/tutorials/recipes/recipes/zeroing_out_gradients.html",
    evidence=DIFFERS,
)
def _clears_by_hand(situation: Situation) -> Iterator[Hit]:
    script = situation.script
    if script is None or script.route is Route.NATIVE or not is_without_deepspeed(situation):
        return
    for call in script.find(Action.ZERO_GRAD):
        cleared = call.clears
        if cleared is not None and cleared.step is not None and not call.is_engine_checked:
            when = f" under `{cleared.every.text}`" if cleared.every else " behind the loop"
            confidence = cleared.confidence if cleared.argument is None else Confidence.LIKELY
            yield hit(call.seen, f" with {cleared.step.text}{when}", confidence)


@Rule(
    id="loss-backward-beside-accelerator",
    severity=Severity.ERROR,
    summary="loss.backward() in place of accelerator.backward(loss)",
    why="accelerator.backward() divides by the accumulation steps, and applies the scale of fp16, which "
    "step() divides by or misses",
    fix="write accelerator.backward(loss)",
    see=f"{ACCELERATE}/accelerator.py",
    evidence=DIFFERS,
)
def _bypasses_accelerator(situation: Situation) -> Iterator[Hit]:
    script = situation.script
    if script is None or script.route is not Route.ACCELERATE or script.find(Action.BACKWARD):
        return
    reason = _fp16(situation, script) or _steps(script)
    own_scaler = script.find(Action.STEP_SCALED, Action.INITIALIZE)
    if reason is None or own_scaler or not is_without_deepspeed(situation) or _is_sharded(situation):
        return
    loops = {call.loop for call in script.find(Action.STEP) if call.loop and not call.is_engine_checked}
    if not script.find(Action.PREPARE):
        return
    for call in script.find(Action.BACKWARD_OF_LOSS):
        if call.loop in loops and not call.is_engine_checked:
            yield hit(call.seen, f" with {reason.text}")


@Rule(
    id="fp16-weights-under-grad-scaler",
    severity=Severity.ERROR,
    summary="under fp16 mixed precision weights that train must be fp32",
    why="torch's GradScaler refuses fp16 gradients: Attempting to unscale FP16 gradients",
    fix="load the model in fp32, autocast computes in fp16 by itself; or train in bf16",
    see="https://github.com/pytorch/pytorch/blob/v2.13.0/torch/amp/grad_scaler.py",
    evidence=fails("Attempting to unscale FP16 gradients"),
)
def _trains_in_half(situation: Situation) -> Iterator[Hit]:
    script = situation.script
    if script is None or not is_without_deepspeed(situation) or _is_sharded(situation):
        return
    for call in script.find(Action.PREPARE, Action.MAKE_TRAINER, Action.STEP_SCALED):
        made, scaler = call.half_weights, _scaler(situation, script, call)
        if made is not None and scaler is not None:
            found = f"{made.text} with {scaler.text}"
            yield Hit(found=found, place=made.place, confidence=least(made.confidence, scaler.confidence))


def _scaler(situation: Situation, script: ScriptFacts, call: ScriptCall) -> Said[object] | None:
    """Return the step of the script's own GradScaler, or the setting that makes accelerate create one."""
    if call.action is Action.STEP_SCALED:
        return Said(value=None, text=call.seen.text, place=call.seen.place)
    trains = call.action is Action.MAKE_TRAINER or script.find(Action.BACKWARD)
    return _fp16(situation, script) if trains else None


def _is_sharded(situation: Situation) -> bool:
    """Return True if FSDP or another engine with a scaler of its own may hold the weights."""
    launch, trainer = launch_of(situation), situation.arguments
    if trainer.find("fsdp") is not None or "fsdp" in trainer.unread:
        return True
    if launch is None:
        return False
    kind = launch_value(launch, "distributed_type")
    has_flag = launch.command is not None and launch.command.find(*_SHARDING_FLAGS) is not None
    return has_flag or (kind is not None and str(kind.value).upper() in _SHARDING)


def _fp16(situation: Situation, script: ScriptFacts) -> Said[object] | None:
    """Return the setting by which accelerate or Trainer make a GradScaler; None if none certainly does."""
    if situation.route is Route.TRAINER:
        said = situation.arguments.find("fp16")
        return said if said is not None and said.value is True else None
    precision = situation.settings.precision
    if situation.route is not Route.ACCELERATE or precision is None or precision.value is not Precision.FP16:
        return None
    given = any("mixed_precision" in call.given for call in script.find(Action.MAKE_ACCELERATOR))
    is_known = any(keyword.name == "mixed_precision" for keyword in script.accelerator_keywords)
    is_open = given and not is_known  # it may be another than the launcher's
    confidence = Confidence.LIKELY if is_open else precision.confidence
    return replace(precision, confidence=confidence)


RULES = declared(vars())
