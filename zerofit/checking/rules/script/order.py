"""Rules on scripts: order of calls, and arguments of prepare()."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zerofit.checking.inputs.accelerate import launch_of_deepspeed, named_deepspeed_file
from zerofit.checking.inputs.quantization import arguments_of_bits
from zerofit.checking.inputs.script_arguments import given_argument, is_on
from zerofit.checking.rule import (
    ACCELERATE,
    COSTS,
    DEEPSPEED,
    Effect,
    Hit,
    Reproduction,
    Rule,
    Severity,
    declared,
    fails,
    hit_of,
)
from zerofit.checking.rules.script.hits import EVERY_STAGE, OF_ENGINE, at_stages, hit, unguarded_calls
from zerofit.checking.rules.script.limits import SHARDED, beyond_limit
from zerofit.checking.situation import stage_of
from zerofit.core.command import Launcher, Route
from zerofit.core.setting import Confidence, Said
from zerofit.core.strategy import ZeroStage
from zerofit.scripts.facts import Action, ModelConstructor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.situation import Situation
    from zerofit.scripts.facts import Keyword, Model


_NO_REFERENCE = "the harness has no reference for its good example"
_DEVICE_MAP = "device_map"
_OVER_ALL_GPUS = {"auto", "balanced", "balanced_low_0"}
"""Values of device_map that spread the layers over all GPUs of the machine."""
_LIBRARY = (ModelConstructor.PRETRAINED, ModelConstructor.CONFIG)
_SEVERAL_CAPTURED = beyond_limit("one-model-per-accelerator", SHARDED, is_of_zerofit=False)
_BATCH = "train_micro_batch_size_per_gpu"
_OWN_PLUGIN = {"deepspeed_plugin", "deepspeed_plugins", "**"}


@Rule(
    id="zero3-device-map",
    severity=Severity.ERROR,
    summary="device_map and ZeRO-3 exclude each other",
    why="ZeRO-3 places each part of a weight itself, so transformers refuses both together",
    fix="leave device_map out of from_pretrained()",
    see="https://huggingface.co/docs/transformers/deepspeed#zero",
    evidence=fails("not compatible with passing a `device_map`"),
)
@at_stages(ZeroStage.PARAMETERS)
def _device_map(situation: Situation) -> Iterator[Hit]:
    for model in situation.script.models if situation.script else ():
        # A model that does not train is refused as well.
        if model.is_before_setup or model.is_in_zero_init or model.source not in _LIBRARY:
            continue
        is_computed = model.device_map is not None and model.device_map.argument is None
        if _device_map_of(model) or is_computed:
            stage = stage_of(situation)
            is_certain = model.is_always_after_setup and stage.confidence is Confidence.CERTAIN
            yield hit(model.made, confidence=Confidence.CERTAIN if is_certain else Confidence.LIKELY)
        elif (said := _given_device_map(situation, model)) is not None:
            yield replace(hit(model.made, f" with {said.text}"), fix=f"leave {said.text} out")
    said = given_argument(situation, _DEVICE_MAP)
    if situation.script is None and situation.command is not None and said is not None and _is_map(said):
        why = "its source is not known here; transformers refuses both together"
        yield hit_of(replace(said, confidence=Confidence.POSSIBLE), why=why, fix=f"leave {said.text} out")


def _given_device_map(situation: Situation, model: Model) -> Said[Any] | None:
    """Return the argument that gives a model's device_map, if it is given one."""
    argument = model.device_map.argument if model.device_map else None
    said = given_argument(situation, argument) if argument else None
    return said if said is not None and _is_map(said) else None


def _is_map(said: Said[Any]) -> bool:
    return str(said.value).lower() not in ("", "none", "null")


def _trained(situation: Situation, *sources: ModelConstructor) -> Iterator[Model]:
    for model in situation.script.models if situation.script else ():
        if model.is_trained and model.source in sources and not model.is_in_zero_init:
            yield model


def _device_map_of(model: Model) -> list[Keyword]:
    return [
        keyword
        for keyword in model.keywords
        if keyword.name.partition(".")[0] == _DEVICE_MAP and keyword.value is not None
    ]


@Rule(
    id="device-map-not-on-ranks",
    severity=Severity.ERROR,
    summary="a model spread over devices by device_map can't be prepared on several ranks",
    why="each rank trains on one device, and accelerate refuses a model on several",
    fix="leave device_map out of from_pretrained()",
    see=f"{ACCELERATE}/accelerator.py",
    evidence=fails("loaded with `device_map='auto'` in any distributed"),
)
def _split_by_device_map(situation: Situation) -> Iterator[Hit]:
    ranks = situation.topology
    several = situation.script is not None and ranks is not None and ranks.world_size > 1
    find = _split_models if several else at_stages(*EVERY_STAGE)(_split_models)
    yield from find(situation)


def _split_models(situation: Situation) -> Iterator[Hit]:
    script = situation.script
    if script is None or script.route not in (Route.ACCELERATE, Route.TRAINER):
        return
    for model in _trained(situation, *_LIBRARY):
        devices = {keyword.value for keyword in _device_map_of(model)}
        said = _given_device_map(situation, model)
        if not devices and said is not None and model.device_map and not model.device_map.is_replaced:
            devices = {said.value}
        splits = len(devices) > 1 or bool(devices & _OVER_ALL_GPUS and _may_have_gpus(situation))
        if not splits or _refused_by_zero3(situation, model):
            continue
        if said is None:
            yield hit(model.made)
        else:
            yield replace(hit(model.made, f" with {said.text}"), fix=f"leave {said.text} out")


def _may_have_gpus(situation: Situation) -> bool:
    """Return True if a rank may see several GPUs."""
    ranks = situation.topology
    return ranks is None or (not ranks.on_cpu and ranks.world_size > ranks.num_nodes)


def _refused_by_zero3(situation: Situation, model: Model) -> bool:
    stage = situation.settings.zero_stage
    return stage is not None and stage.value is ZeroStage.PARAMETERS and not model.is_before_setup


@Rule(
    id="zero3-model-made-too-early",
    severity=Severity.ADVICE,
    summary="under ZeRO-3 the model must be created after Accelerator() or TrainingArguments()",
    why="only then does transformers know about ZeRO-3; before, every rank loads the whole model",
    fix="create the Accelerator or the TrainingArguments first",
    see="https://huggingface.co/docs/transformers/deepspeed#non-trainer-integration",
    evidence=COSTS,
)
@at_stages(ZeroStage.PARAMETERS)
def _made_too_early(situation: Situation) -> Iterator[Hit]:
    for model in _trained(situation, *_LIBRARY):
        if model.later_setup is not None:
            yield hit(model.made, f" before {model.later_setup.text} in line {model.later_setup.place.line}")


@Rule(
    id="zero3-quantized-model-whole",
    severity=Severity.ADVICE,
    summary="under ZeRO-3 every rank loads the whole of a model that bitsandbytes quantizes",
    why="from_pretrained() does not partition quantized weights at construction, so each rank first needs "
    "memory for all of them",
    fix="load it unquantized, or set {zero_stage} to 2 or less",
    see="https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/modeling_utils.py",
    evidence=COSTS,
)
@at_stages(ZeroStage.PARAMETERS)
def _quantized_whole(situation: Situation) -> Iterator[Hit]:
    if situation.strategy is not None or situation.launcher is Launcher.ZEROFIT:
        return  # quantized-script-below-zero3
    if situation.script is None:
        for named in _quantizing_arguments(situation):
            yield hit_of(replace(named, confidence=Confidence.LIKELY), why=_WHY_UNREAD)
    for model in _trained(situation, ModelConstructor.PRETRAINED):
        quantization = model.quantization
        if quantization is None:
            continue
        given = [said for name in quantization.arguments if (said := given_argument(situation, name))]
        asked = next(filter(is_on, given), None)
        if asked is not None or not quantization.arguments:
            yield hit(quantization.made, f" with {asked.text}" if asked else "")


@Rule(
    id="unsloth-without-zero3",
    severity=Severity.ERROR,
    summary="unsloth does not train under ZeRO-3",
    why="it loads the whole model with a device_map, which transformers refuses under ZeRO-3",
    fix="leave unsloth out, or set {zero_stage} to 2 or less",
    see="https://github.com/hiyouga/LlamaFactory/issues/3949",
    evidence=fails(not_reproduced="needs unsloth and a GPU"),
)
@at_stages(ZeroStage.PARAMETERS)
def _unsloth(situation: Situation) -> Iterator[Hit]:
    said = given_argument(situation, "use_unsloth")
    if said is not None and is_on(said):
        yield hit_of(replace(said, confidence=Confidence.LIKELY), fix=f"leave {said.text} out, or use ZeRO-2")
    backend = given_argument(situation, "tuner_backend")  # of ms-swift
    if backend is not None and backend.value == "unsloth":
        yield hit_of(replace(backend, confidence=Confidence.LIKELY))


_WHY_UNREAD = (
    "by its name it quantizes the model, which each rank then loads whole; earlier releases of transformers "
    "refuse it (device_map)"
)


def _quantizing_arguments(situation: Situation) -> Iterator[Said[Any]]:
    """Yield the arguments of a script that can't be read that by their names quantize its model."""
    for bits in (4, 8):
        yield from arguments_of_bits(situation, bits)


@Rule(
    id="zero3-model-made-whole",
    severity=Severity.ADVICE,
    summary="under ZeRO-3 calling a model's class directly creates the whole model on every rank",
    why="only from_pretrained() and from_config() partition each layer at construction",
    fix="use from_pretrained() or from_config(), or create it inside `with deepspeed.zero.Init():`",
    see="https://deepspeed.readthedocs.io/en/latest/zero3.html#constructing-massive-models",
    evidence=COSTS,
)
@at_stages(ZeroStage.PARAMETERS)
def _made_whole(situation: Situation) -> Iterator[Hit]:
    for model in _trained(situation, ModelConstructor.CLASS):
        yield hit(model.made)


@Rule(
    id="resize-before-prepare",
    severity=Severity.ERROR,
    summary="embeddings must be resized before the model is prepared",
    why="DeepSpeed keeps the original parameters, and does not know the new ones",
    fix="call resize_token_embeddings() before prepare()",
    see="https://huggingface.co/docs/accelerate/v1.15.0/usage_guides/deepspeed",
    evidence=fails("'Parameter' object has no attribute 'ds_status'"),
)
@at_stages(*EVERY_STAGE)
def _resized_after_prepare(situation: Situation) -> Iterator[Hit]:
    script = situation.script
    for call in script.find(Action.RESIZE) if script and script.route is not Route.TRAINER else ():
        if call.state in OF_ENGINE:
            yield hit(call.seen, " after the model was prepared")


@Rule(
    id="zero3-compile-after-prepare",
    severity=Severity.ERROR,
    summary="under ZeRO-3 prepare() can't take a model compiled by torch.compile()",
    why="DeepSpeed sets attributes on modules, which the compiled wrapper lacks",
    fix="leave torch.compile() out, or call engine.compile() after prepare()",
    see="https://github.com/deepspeedai/DeepSpeed/issues/6961",
    evidence=fails("_in_forward"),
)
@at_stages(ZeroStage.PARAMETERS)
def _compiled_before_prepare(situation: Situation) -> Iterator[Hit]:
    for call in unguarded_calls(situation, Action.PREPARE):
        if call.is_compiled:
            yield hit(call.seen, " of a model compiled by torch.compile()")


@Rule(
    id="one-model-per-accelerator",
    severity=Severity.ERROR,
    summary="under DeepSpeed an Accelerator can only prepare one model",
    why="prepare() creates one DeepSpeed engine, and accelerate refuses a second model",
    fix="prepare the trained model, and move the others to accelerator.device",
    see="https://huggingface.co/docs/accelerate/usage_guides/deepspeed_multiple_model",
    evidence=fails("multiple models when using DeepSpeed"),
)
def _several_models(situation: Situation) -> Iterator[Hit]:
    find = _several_in_source if situation.capture is None else _SEVERAL_CAPTURED
    yield from find(situation)


@at_stages(*EVERY_STAGE)
def _several_in_source(situation: Situation) -> Iterator[Hit]:
    for call in unguarded_calls(situation, Action.PREPARE):
        if call.num_models > 1:
            yield hit(call.seen, f" with {call.num_models} models")


@Rule(
    id="prepare-needs-batch-size",
    severity=Severity.ERROR,
    summary="under DeepSpeed prepare() needs a DataLoader with a batch_size, beside the model",
    why='accelerate takes a micro batch size of "auto", the default without a DeepSpeed file, from it',
    fix=f"prepare model, optimizer and DataLoader in one call, or set {_BATCH} in a DeepSpeed file",
    see=f"{ACCELERATE}/accelerator.py",
    evidence=fails("requires you to pass at least one of training or evaluation dataloaders"),
)
@at_stages(*EVERY_STAGE)
def _prepared_without_size(situation: Situation) -> Iterator[Hit]:
    script = situation.script
    if script is None or script.route is not Route.ACCELERATE or script.find(Action.MAKE_PLUGIN):
        return
    has_plugin = any(call.given & _OWN_PLUGIN for call in script.find(Action.MAKE_ACCELERATOR))
    for call in script.find(Action.PREPARE) if not has_plugin and _takes_loaders_size(situation) else ():
        if call.num_loaders is None or call.is_conditional:
            return
        if call.unsized_loader is not None:
            yield hit(call.unsized_loader, " without a batch_size, in prepare()")
        elif call.num_loaders == 0:
            is_certain = call.is_in_each_run and not call.has_unknown
            yield hit(
                call.seen, " without a DataLoader", Confidence.CERTAIN if is_certain else Confidence.LIKELY
            )
        elif call.num_models == 0:
            continue  # without a model accelerate does not keep the size
        return


def _takes_loaders_size(situation: Situation) -> bool:
    """Return True if the micro batch size is "auto", as it is without a DeepSpeed file."""
    if situation.deepspeed is not None:
        return bool(situation.deepspeed.value(_BATCH) == "auto")
    launch, _ = launch_of_deepspeed(situation) or (None, None)
    return launch is not None and named_deepspeed_file(launch) is None


@Rule(
    id="prepare-splits-no-iterator",
    severity=Severity.ERROR,
    summary="prepare() returns an iterator as it is, and every rank gets all batches",
    why="accelerate splits the batches of a DataLoader over the ranks, and knows nothing else",
    fix="prepare the DataLoader, and iterate over the prepared one",
    see=f"{ACCELERATE}/accelerator.py",
    evidence=Reproduction(outcome=Effect.DIFFERS, not_reproduced=_NO_REFERENCE),
)
def _prepares_iterator(situation: Situation) -> Iterator[Hit]:
    script, ranks = situation.script, situation.topology
    if script is None or (ranks is not None and ranks.world_size == 1):
        return
    for call in script.find(Action.PREPARE):
        if call.iterator is not None:
            yield hit(call.iterator, f" of a DataLoader, passed to {call.seen.text}")


@Rule(
    id="dummy-scheduler-needs-section",
    severity=Severity.ERROR,
    summary="DummyScheduler needs a scheduler section, which is missing",
    why="accelerate only takes the placeholder if DeepSpeed's file says which scheduler it stands for",
    fix="create a real scheduler where the file has none, and DummyScheduler where it has one",
    see=f"{ACCELERATE}/accelerator.py",
    evidence=fails("Either specify a scheduler in the config file", not_reproduced=_NO_REFERENCE),
)
@at_stages(*EVERY_STAGE)
def _dummy_without_section(situation: Situation) -> Iterator[Hit]:
    script = situation.script
    if script is None:
        return
    for call in script.find(Action.MAKE_DUMMY_SCHEDULER):
        if "lr_scheduler_callable" in call.given:
            continue
        if call.without_section is not None:
            yield hit(call.seen, f" under `{call.without_section.text}`")
        elif not call.is_conditional and _has_no_scheduler(situation):
            is_certain = any(
                prepared.made == call.seen and prepared.is_certain and prepare.is_in_each_run
                for prepare in script.find(Action.PREPARE)
                for prepared in prepare.prepared
            )
            confidence = Confidence.CERTAIN if is_certain else Confidence.LIKELY
            yield hit(call.seen, " with no scheduler in DeepSpeed's configuration", confidence)


def _has_no_scheduler(situation: Situation) -> bool:
    """Return True if DeepSpeed's configuration is known, and has no section for a scheduler."""
    if situation.deepspeed is not None:
        return situation.deepspeed.at("scheduler") is None
    launch, _ = launch_of_deepspeed(situation) or (None, None)
    return launch is not None and named_deepspeed_file(launch) is None


_MEANT = {"num_warmup_steps": "warmup_num_steps", "num_training_steps": "total_num_steps"}


@Rule(
    id="dummy-scheduler-argument-ignored",
    severity=Severity.WARNING,
    summary="DummyScheduler ignores arguments that it does not know",
    why="it takes any, and hands only total_num_steps and warmup_num_steps to DeepSpeed's scheduler",
    fix="use its names: total_num_steps and warmup_num_steps",
    see=f"{ACCELERATE}/utils/deepspeed.py",
    evidence=Reproduction(outcome=Effect.DIFFERS, not_reproduced=_NO_REFERENCE),
)
def _ignored_by_dummy(situation: Situation) -> Iterator[Hit]:
    script = situation.script
    for call in script.find(Action.MAKE_DUMMY_SCHEDULER) if script else ():
        for name in sorted(call.given & set(_MEANT)):
            yield replace(hit(call.seen, f": {name}"), fix=f"write {_MEANT[name]}")


@Rule(
    id="zero12-needs-optimizer",
    severity=Severity.ERROR,
    summary="ZeRO-1 and ZeRO-2 need an optimizer",
    why="they partition optimizer states and gradients, which evaluation lacks",
    fix="run without DeepSpeed, or set {zero_stage} to 3 if the model is too large for one GPU",
    see=f"{DEEPSPEED}/runtime/engine.py",
    evidence=fails("requires an optimizer"),
)
@at_stages(ZeroStage.OPTIMIZER_STATES, ZeroStage.GRADIENTS)
def _evaluates_only(situation: Situation) -> Iterator[Hit]:
    script = situation.script
    if script is None or script.find(Action.BACKWARD, Action.TRAIN) or script.optimizers:
        return
    makes = script.find(Action.PREPARE, Action.INITIALIZE)
    named = situation.deepspeed.at("optimizer") if situation.deepspeed else None
    if any(call.has_optimizer for call in makes) or named is not None:
        return
    for call in makes:
        has_model = call.num_models == 1 or call.action is Action.INITIALIZE
        if has_model and not call.is_engine_checked:
            yield hit(call.seen, f" without an optimizer, with {stage_of(situation).text}")


RULES = declared(vars())
