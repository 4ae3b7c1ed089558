"""Rules on scripts: accumulation, clipping and repeated passes in the training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.checking.inputs.accelerate import launch_of, launch_value, whole_number
from zerofit.checking.inputs.script_arguments import argument_pairs, given_argument
from zerofit.checking.rule import (
    ACCELERATE,
    DIFFERS,
    Effect,
    Hit,
    Reproduction,
    Rule,
    Severity,
    declared,
    fails,
)
from zerofit.checking.rules.script.hits import EVERY_STAGE, OF_ENGINE, at_stages, hit, unguarded_calls
from zerofit.checking.rules.script.limits import beyond_limit
from zerofit.core.command import Route
from zerofit.core.setting import Confidence, Said
from zerofit.core.strategy import ZeroStage
from zerofit.scripts.facts import Action, ModelState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.inputs.accelerate import LaunchLayers
    from zerofit.checking.situation import Situation
    from zerofit.scripts.facts import ScriptCall, ScriptFacts


_CHECKPOINTS_CAPTURED = beyond_limit("prefix-tuning-without-checkpointing", ("gradient_checkpointing",))
_CHECKPOINTING_FIELDS = ("gradient_checkpointing", "activation_checkpointing")
"""Of TrainingArguments; the latter since transformers 5.23."""
_DEFAULT_CLIPPING = 1.0
"""accelerate's default for "auto", and DeepSpeed's own (deepspeed/runtime/constants.py)."""
_ACCUMULATION_DOCS = "https://huggingface.co/docs/accelerate/v1.15.0/usage_guides/gradient_accumulation"


@Rule(
    id="accumulation-needs-accumulate",
    severity=Severity.ERROR,
    summary="gradient accumulation needs accelerator.accumulate()",
    why="outside it every micro-batch is a separate step, with gradients divided by the steps",
    fix="put the step into `with accelerator.accumulate(model):`, or set the steps to 1",
    see=_ACCUMULATION_DOCS,
    evidence=DIFFERS,
)
@at_stages(*EVERY_STAGE)
def _never_accumulates(situation: Situation) -> Iterator[Hit]:
    script = _own_loop(situation)
    if script is None or any(_manual_steps(script)):
        return
    backward = next((call for call in unguarded_calls(situation, Action.BACKWARD) if call.loop), None)
    steps = _accumulation(situation, script)
    if backward is not None and steps is not None:
        yield hit(backward.seen, f" outside accumulate(), with {steps}")


_TELLS = {"gradient_accumulation_steps", "gradient_accumulation_plugin", "**"}
STEPS_NAMES = ("gradient_accumulation_steps", "grad_accum_steps", "gradient_accumulation", "grad_accum")
"""Arguments of public scripts for the steps of accumulation."""


@Rule(
    id="accelerator-not-told-accumulation",
    severity=Severity.ERROR,
    summary="the Accelerator does not know the steps of accumulation, so accumulate() steps in each batch",
    why="accumulate() counts to the Accelerator's own number, which is 1 by default",
    fix="give Accelerator(gradient_accumulation_steps=...) the value",
    see=_ACCUMULATION_DOCS,
    evidence=Reproduction(
        outcome=Effect.DIFFERS, not_reproduced="the harness has no reference for its good example"
    ),
)
def _not_told(situation: Situation) -> Iterator[Hit]:
    script = situation.script
    if script is None or script.route is not Route.ACCELERATE or not script.find(Action.ACCUMULATE):
        return
    makes = script.find(Action.MAKE_ACCELERATOR)
    if not makes or is_told_steps(script) or any(_manual_steps(script)) or _is_told_by_others(situation):
        return
    asked, made = _asked_steps(situation), makes[0].seen
    if asked is not None:
        yield hit(made, f" with {asked.text}")
    elif situation.command is None and situation.accelerate is None and situation.deepspeed is None:
        own = next((option for option in script.arguments if option.dest in STEPS_NAMES), None)
        if own is not None:
            yield hit(made, f" without the script's own --{own.dest}")


def is_told_steps(script: ScriptFacts) -> bool:
    """Return True if a script gives its Accelerator the steps of accumulation, or may do so."""
    calls = script.find(Action.MAKE_ACCELERATOR, Action.MAKE_PLUGIN)
    return script.sets_accumulation or any(call.given & _TELLS for call in calls)


def _is_told_by_others(situation: Situation) -> bool:
    """Return True if the launcher, its file or DeepSpeed's says more than one step, or may do so."""
    launch = launch_of(situation)
    said = launch_value(launch, "gradient_accumulation_steps") if launch is not None else None
    is_open = situation.accelerate is None and launch is not None and _names_file(launch)
    file = situation.file.value("gradient_accumulation_steps")
    values = (said.value if said is not None else None, file)
    return is_open or any(value not in (None, 1, "1", "auto") for value in values)


def _names_file(launch: LaunchLayers) -> bool:
    return launch.command is not None and launch.command.find("config_file") is not None


def _asked_steps(situation: Situation) -> Said[Any] | None:
    """Return the steps of accumulation that the script's own arguments ask for, if those are several."""
    arguments = situation.command.arguments if situation.command else ()
    for name, value, text in argument_pairs(arguments):
        if name.rpartition(".")[2] in STEPS_NAMES and (whole_number(value) or 0) > 1:
            return Said(value=value, text=text)
    said = given_argument(situation, *STEPS_NAMES)
    return said if said is not None and (whole_number(said.value) or 0) > 1 else None


def _own_loop(situation: Situation) -> ScriptFacts | None:
    """Return a script with Accelerator() that calls backward() itself and never accumulate()."""
    script = situation.script
    if script is None or script.route is not Route.ACCELERATE or script.find(Action.ACCUMULATE):
        return None
    return script if script.find(Action.BACKWARD) else None


def _manual_steps(script: ScriptFacts) -> Iterator[ScriptCall]:
    """Yield the optimizer steps under a modulo condition, with backward() in every iteration."""
    in_each = {call.loop for call in script.find(Action.BACKWARD) if call.every_few_steps is None}
    for call in script.find(Action.STEP):
        if call.every_few_steps is not None and call.loop in in_each and not call.is_engine_checked:
            yield call


def _accumulation(situation: Situation, script: ScriptFacts) -> str | None:
    """Return the user's setting that requests accumulation; None if there certainly is none."""
    entry = situation.deepspeed.at("gradient_accumulation_steps") if situation.deepspeed else None
    if entry is not None and isinstance(entry.plain, int):
        return f"gradient_accumulation_steps={entry.plain}" if entry.plain > 1 else None
    if situation.deepspeed is not None and entry is None:
        return None  # another error: accelerate then uses 1, whatever the script says
    for keyword in script.accelerator_keywords:
        is_number = isinstance(keyword.value, int) and keyword.value > 1
        if keyword.name == "gradient_accumulation_steps" and is_number:
            return keyword.text
    return None


@Rule(
    id="accumulation-by-hand",
    severity=Severity.ERROR,
    summary="under DeepSpeed manual accumulation does not work with accelerate",
    why="accelerator.backward() also runs DeepSpeed's step, so each micro-batch is a separate step",
    fix="put the training step into `with accelerator.accumulate(model):` and step in each pass",
    see=f"{ACCELERATE}/utils/deepspeed.py",
    evidence=DIFFERS,
    is_fixed_by_launch=True,
)
@at_stages(*EVERY_STAGE)
def _accumulates_manually(situation: Situation) -> Iterator[Hit]:
    script = _own_loop(situation)
    for call in _manual_steps(script) if script else ():
        if call.every_few_steps is not None:
            yield hit(call.seen, f" under `{call.every_few_steps.text}`", Confidence.POSSIBLE)


@Rule(
    id="backward-through-accelerator",
    severity=Severity.ERROR,
    summary="under DeepSpeed loss.backward() without the Accelerator trains nothing",
    why="accelerator.backward() runs DeepSpeed's step, and the prepared optimizer's step() does nothing",
    fix="write accelerator.backward(loss)",
    see=f"{ACCELERATE}/utils/deepspeed.py",
    evidence=DIFFERS,
)
@at_stages(*EVERY_STAGE)
def _bypasses_accelerator(situation: Situation) -> Iterator[Hit]:
    script = situation.script
    if script is None or script.route is not Route.ACCELERATE or script.find(Action.BACKWARD):
        return
    if any(call.state is ModelState.ENGINE for call in script.find(Action.STEP)):
        return  # the engine's own step() after loss.backward() does train
    forwards = unguarded_calls(situation, Action.FORWARD)
    loops = {call.loop for call in forwards if call.loop and call.state is ModelState.ENGINE}
    for call in unguarded_calls(situation, Action.BACKWARD_OF_LOSS):
        if call.loop in loops:
            yield hit(call.seen)


@Rule(
    id="deepspeed-clips-by-its-own",
    severity=Severity.WARNING,
    summary="under DeepSpeed the script's clip_grad_norm_() has no effect",
    why="DeepSpeed has already clipped and stepped inside backward(), with its own gradient_clipping",
    fix="set {gradient_clipping} to the script's value",
    see=f"{ACCELERATE}/accelerator.py",
    evidence=DIFFERS,
    is_fixed_by_launch=True,
)
@at_stages(*EVERY_STAGE)
def _clipping_is_ignored(situation: Situation) -> Iterator[Hit]:
    script = situation.script
    if script is None or script.route is not Route.ACCELERATE or situation.deepspeed is None:
        return
    entry = situation.deepspeed.at("gradient_clipping")
    value = _DEFAULT_CLIPPING if entry is None or entry.plain == "auto" else entry.plain
    if not isinstance(value, (int, float)):
        return
    said = f"gradient_clipping={value}" if entry and entry.plain != "auto" else f"the default of {value}"
    for call in unguarded_calls(situation, Action.CLIP):
        norm = call.keyword("max_norm")
        is_other = norm is not None and isinstance(norm.value, (int, float)) and norm.value != value
        if is_other and call.state in OF_ENGINE:
            shown = "" if norm is None or str(norm.value) in call.seen.text else f" ({norm.value} by default)"
            yield hit(call.seen, f"{shown} with {said}")


@Rule(
    id="two-forwards-need-new-checkpointing",
    severity=Severity.ERROR,
    summary="two forward passes per backward need use_reentrant=False under ZeRO-2 and ZeRO-3",
    why="reentrant checkpointing runs a nested backward in each, and reduces the same gradient twice",
    fix="set use_reentrant to False, or join both batches into one forward pass",
    see="https://github.com/deepspeedai/DeepSpeed/issues/988",
    evidence=fails("has already been reduced"),
)
@at_stages(ZeroStage.GRADIENTS, ZeroStage.PARAMETERS)
def _two_forwards(situation: Situation) -> Iterator[Hit]:
    script = situation.script
    if script is None or not any(map(_is_reentrant, script.find(Action.CHECKPOINT_ACTIVATIONS))):
        return
    for call in script.find(Action.BACKWARD):
        if len(call.forwards) > 1:
            yield hit(call.seen, f" after {' and '.join(seen.text for seen in call.forwards)}")


def _is_reentrant(call: ScriptCall) -> bool:
    return any(
        keyword.name == "gradient_checkpointing_kwargs.use_reentrant" and keyword.value is True
        for keyword in call.keywords
    )


@Rule(
    id="prefix-tuning-without-checkpointing",
    severity=Severity.ERROR,
    summary="prefix tuning can't train with gradient checkpointing",
    why="the prefix is in the cache of keys and values, which gradient checkpointing drops",
    fix="leave gradient checkpointing off, or train other adapters, such as LoRA",
    see="https://github.com/huggingface/peft/blob/v0.21.2/src/peft/peft_model.py",
    evidence=fails("The size of tensor a"),
)
def _checkpoints_prefix(situation: Situation) -> Iterator[Hit]:
    """Find both in one script; Trainer's option and zerofit's flag count like the model's."""
    if situation.capture is not None:
        yield from _CHECKPOINTS_CAPTURED(situation)
    script = situation.script
    for prefix in script.find(Action.TUNE_PREFIX) if script else ():
        for said in map(situation.arguments.find, _CHECKPOINTING_FIELDS):
            if said is not None and said.value is True:
                yield hit(prefix.seen, f" with {said.text}", _confidence(prefix))
        for call in unguarded_calls(situation, Action.CHECKPOINT_ACTIVATIONS):
            yield hit(call.seen, f" with {prefix.seen.text}", _confidence(prefix, call))


@Rule(
    id="adapters-loaded-frozen",
    severity=Severity.ERROR,
    summary="adapters loaded without is_trainable=True do not train",
    why="peft loads them for inference, so that no parameter of the model has a gradient",
    fix="pass is_trainable=True to from_pretrained()",
    see="https://github.com/huggingface/peft/blob/v0.21.2/src/peft/peft_model.py",
    evidence=fails("list index out of range"),
)
def _trains_frozen(situation: Situation) -> Iterator[Hit]:
    script = situation.script
    if script is None or not script.find(Action.TRAIN, Action.BACKWARD):
        return
    for call in script.find(Action.MAKE_TRAINER, Action.PREPARE, Action.INITIALIZE):
        trains = call.trains_after if call.action is Action.MAKE_TRAINER else call.has_optimizer
        is_alone = call.num_models == 1 or call.action is not Action.PREPARE
        if call.frozen_by is not None and trains and is_alone:
            yield hit(call.frozen_by, " without is_trainable=True")


def _confidence(*calls: ScriptCall) -> Confidence:
    return Confidence.POSSIBLE if any(call.is_conditional for call in calls) else Confidence.LIKELY


@Rule(
    id="second-order-gradients-under-zero",
    severity=Severity.ERROR,
    summary="ZeRO can't train a loss that contains gradients",
    why="a parameter then gets its gradient twice in one backward pass, and ZeRO reduces the first at once",
    fix="train without ZeRO: {engine} native, or {zero_stage} 0",
    see="https://github.com/deepspeedai/DeepSpeed/issues/1312",
    evidence=fails("IndexError"),
)
@at_stages(ZeroStage.OPTIMIZER_STATES, ZeroStage.GRADIENTS, ZeroStage.PARAMETERS)
def _second_order_gradients(situation: Situation) -> Iterator[Hit]:
    if any(unguarded_calls(situation, Action.BACKWARD)):
        for call in unguarded_calls(situation, Action.DIFFERENTIATE_TWICE):
            yield hit(call.seen)


@Rule(
    id="sampler-without-set-epoch",
    severity=Severity.WARNING,
    summary="a DistributedSampler shuffles each epoch in the same order",
    why="it shuffles by its seed and its epoch, which stays 0 until set_epoch() says otherwise",
    fix="call the sampler's set_epoch(epoch) at the beginning of each epoch",
    see="https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler",
    evidence=Reproduction(
        outcome=Effect.DIFFERS, not_reproduced="the harness has no reference for its good example"
    ),
)
def _same_order(situation: Situation) -> Iterator[Hit]:
    script = situation.script
    if script is None or not script.repeats_epochs or script.route is Route.TRAINER:
        return
    if any(call.num_loaders != 0 for call in script.find(Action.PREPARE)):
        return  # accelerate's DataLoader tells the sampler itself (data_loader.py)
    trains = any(script.find(Action.BACKWARD, Action.BACKWARD_OF_LOSS, Action.STEP, Action.STEP_UNKNOWN))
    for call in unguarded_calls(situation, Action.MAKE_SAMPLER):
        shuffles = call.keyword("shuffle")
        if call.given & {"shuffle", "**"} and (shuffles is None or not shuffles.value):
            continue
        yield hit(call.seen, "", Confidence.LIKELY if trains else Confidence.POSSIBLE)


RULES = declared(vars())
