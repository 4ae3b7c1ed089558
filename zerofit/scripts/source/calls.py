"""Calls of libraries in a script: what they return, and their effect on models, engines and trainers."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.core.setting import Confidence
from zerofit.scripts.facts import Action, ModelConstructor, ModelState, Prepared, UsedOptimizer
from zerofit.scripts.source import config_reads, model_options, names, parsers, schedules, weights
from zerofit.scripts.source.conditions import exclude, lacks_section
from zerofit.scripts.source.reading import ContextEffect, given_to, wrapped
from zerofit.scripts.source.values import (
    Constant,
    LocalFunction,
    Mapping,
    Method,
    ObjectKind,
    Several,
    TrackedObject,
    Value,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zerofit.scripts.source.reading import CallSite, Reading, RecordedCall

_RECORDED_ONLY = {
    **dict.fromkeys(names.PLUGINS, Action.MAKE_PLUGIN),
    **dict.fromkeys(names.FSDP_PLUGINS, Action.MAKE_FSDP_PLUGIN),
    **dict.fromkeys(names.QUANTIZERS, Action.QUANTIZE),
    **dict.fromkeys(names.GENERATES, Action.GENERATE_TOGETHER),
    **dict.fromkeys(names.BARRIERS, Action.WAIT),
    **dict.fromkeys(names.RANK_SETUPS, Action.SET_UP_RANKS),
    **dict.fromkeys(names.GATHERED, Action.GATHER_PARAMETERS),
    **dict.fromkeys(names.PREFIX_TUNING, Action.TUNE_PREFIX),
    **dict.fromkeys(names.EARLY_STOPPING, Action.STOP_EARLY),
    **dict.fromkeys(names.SHARD_MERGES, Action.GATHER_SHARDS),
    **dict.fromkeys(names.SAMPLERS_OF_RANKS, Action.MAKE_SAMPLER),
}
"""Functions and classes whose results are not tracked."""
_SAME_MODEL = {
    "to", "cuda", "cpu", "eval", "train", "half", "bfloat16", "float", "requires_grad_", "apply",
}  # fmt: skip
_MERGES = ("merge_and_unload", "unload")
"""Methods of peft's models that return the model without its adapters."""
_MODEL_ACTIONS = {
    "generate": Action.GENERATE,
    "save_pretrained": Action.SAVE_PRETRAINED,
    "resize_token_embeddings": Action.RESIZE,
    "gradient_checkpointing_enable": Action.CHECKPOINT_ACTIVATIONS,
    "state_dict": Action.STATE_DICT,
    "load_state_dict": Action.LOAD_STATE_DICT,
}
_ENGINE_ACTIONS = {
    "save_checkpoint": Action.SAVE_CHECKPOINT,
    "save_16bit_model": Action.SAVE_16BIT_MODEL,
    "save_fp16_model": Action.SAVE_16BIT_MODEL,
    "step": Action.STEP,
}
_TRAINER_ACTIONS = {
    "train": Action.TRAIN,
    "evaluate": Action.EVALUATE,
    "predict": Action.EVALUATE,
    "hyperparameter_search": Action.TRAIN,
    "save_model": Action.SAVE_MODEL,
}
_ACCELERATOR_ACTIONS = {
    "save_state": Action.SAVE_STATE,
    "load_state": Action.LOAD_STATE,
    "wait_for_everyone": Action.WAIT,
    "reduce": Action.GATHER,
    "pad_across_processes": Action.GATHER,
    "save_model": Action.SAVE_MODEL,
    "get_state_dict": Action.GET_STATE_DICT,
}
_GATHERS = {"gather", "gather_for_metrics"}
_ITERATES = ("iter", "enumerate", "zip", "map")
_PREPARE = {"prepare", "prepare_model", "prepare_optimizer", "prepare_scheduler"}
_PREPARED = (ObjectKind.MODEL, ObjectKind.OPTIMIZER, ObjectKind.LOADER, ObjectKind.SCHEDULER)
_ADAPTS = {"peft.get_peft_model", "peft.mapping.get_peft_model"}
_SAME_WEIGHTS = {
    "torch.compile",
    "peft.prepare_model_for_kbit_training",
    "peft.utils.prepare_model_for_kbit_training",
}
_SAME_TENSOR = {"to", "cpu", "cuda", "contiguous", "clone", "detach", "int", "long"}
_SAME_LENGTH = {"min_new_tokens", "min_length"}
"""Settings with which each rank may generate the same number of tokens."""
_LONGEST = {"max_new_tokens", "max_length"}
"""Settings beside which `**inputs` is the tokenizer's output, without further settings."""
_GIVES_OPTIMIZER = {"optimizer", "model_parameters", "**"}
"""Of deepspeed.initialize(): parameters imply an optimizer from the configuration."""
_DUMMY_OPTIMIZER = "accelerate.DummyOptim"
_OF_DEEPSPEED = ("deepspeed_config", "deepspeed_plugin", "hf_ds_config")
"""Names under which a script reaches DeepSpeed's configuration, and may change it."""
_CLIP = {"torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad.clip_grad_norm_"}
_PLAIN_MODELS = {"torch.nn.Sequential", "torch.nn.Linear"}


def call_unknown(reading: Reading, call: CallSite) -> Value:
    """Record a call of something unknown, and return its result."""
    node = call.node
    name = names.called_name(node) if isinstance(node, ast.Call) else ""
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    if (read := config_reads.call_builtin(reading, name, call)) is not None:
        return read
    if name in _ITERATES and not is_method and (iterator := iterator_over(call)) is not None:
        return iterator
    mark_escaped(call.values)
    config_reads.mark_changed(call.values, name)
    parsers.mark_arguments_unknown(call.values, name)
    if name in names.PARSE_CALLS:
        reading.record(Action.PARSE_ARGUMENTS, node)
    if name == "dict" and not call.arguments:
        return Mapping(tuple(call.keywords.items()))
    if name == "add_argument":
        parsers.record_default(reading, call)
    if name == "set_state_dict_type":
        reading.record(Action.GATHER_SHARDS, node)
    if name == "len":
        schedules.note_length(reading, call)
    if name == "update" and isinstance(node, ast.Call):
        model_options.note_update(reading, node)
    if name == "backward" and is_method and not call.arguments:
        reading.record(Action.BACKWARD_OF_LOSS, node)
    if is_method and name in ("step", "zero_grad"):
        _record_unknown_optimizer(reading, name, call)
    return None


def _record_unknown_optimizer(reading: Reading, name: str, call: CallSite) -> None:
    """Record a step() or zero_grad() of something unknown, or the step() of a GradScaler."""
    stepped = call.arguments[0] if call.arguments else None
    if name == "step" and isinstance(stepped, TrackedObject) and stepped.kind is ObjectKind.OPTIMIZER:
        reading.record(Action.STEP_UNKNOWN, call.node, stepped)
        return
    if isinstance(call.node, ast.Call) and isinstance(call.node.func, ast.Attribute):
        is_scaled = name == "step" and bool(call.node.args)
        owner = call.node.args[0] if is_scaled else call.node.func.value
        action = Action.ZERO_GRAD if name == "zero_grad" else Action.STEP_UNKNOWN
        reading.record(action, call.node, _unknown_optimizer(reading, owner))


def _unknown_optimizer(reading: Reading, node: ast.expr) -> TrackedObject:
    """Return the object of unknown class that an expression names, which may be an optimizer."""
    made = TrackedObject(kind=ObjectKind.OTHER, node=node)
    return reading.unknown_optimizers.setdefault(ast.unparse(node), made)


def call_library(reading: Reading, name: str, call: CallSite) -> Value:
    """Record a call of a library's class or function, and return its result."""
    owner, _, last = name.rpartition(".")
    node = call.node
    if name in names.ACCELERATORS:
        reading.record_with_keywords(Action.MAKE_ACCELERATOR, call)
        reading.accelerator_keywords += reading.certain_keywords_of(call)
        reading.accelerator_arguments += reading.arguments_of(call)
        return TrackedObject(kind=ObjectKind.ACCELERATOR, node=node)
    if name in names.GRAD_SCALERS and call.keywords.get("enabled", Constant(True)) == Constant(True):
        return TrackedObject(kind=ObjectKind.SCALER, node=node)
    if name in names.ACCUMULATION_PLUGINS:
        of_plugin = reading.certain_keywords_of(call)
        reading.accelerator_keywords += [replace(word, name=f"plugin.{word.name}") for word in of_plugin]
        reading.accelerator_arguments += reading.arguments_of(call, "plugin.")
        return None
    if name in names.PROJECT_CONFIGURATIONS:
        of_project = reading.certain_keywords_of(call)
        reading.accelerator_keywords += [replace(word, name=f"project.{word.name}") for word in of_project]
        return None
    if names.is_arguments(name):
        reading.record_with_keywords(Action.MAKE_ARGUMENTS, call)
        reading.training_arguments += reading.certain_keywords_of(call)
        reading.parsed_training_arguments += reading.arguments_of(call)
        return TrackedObject(kind=ObjectKind.ARGUMENTS, node=node)
    if name in names.ARGUMENT_PARSERS:
        reading.record(Action.MAKE_PARSER, node)
        return parsers.make_parser(node)
    if name in names.DEEPSPEED_ARGUMENTS:
        return parsers.with_options(call.arguments[0], names.DEEPSPEED_OPTIONS) if call.arguments else None
    if name == names.ZERO_INIT or (last == "HfDeepSpeedConfig" and not name.startswith("accelerate.")):
        return config_reads.record_reader(reading, name, call)
    if last == "BitsAndBytesConfig":
        model_options.note_quantizer(reading, call)
    if name in _RECORDED_ONLY:
        reading.record_with_keywords(_RECORDED_ONLY[name], call)
        return None
    if name == names.PATH:
        return config_reads.opened(reading, call, "path")
    if name in names.DUMMY_SCHEDULERS:
        _record_dummy_scheduler(reading, call)
    if (scheduler := schedules.make_scheduler(reading, name, call)) is not None:
        return scheduler
    if name in names.LOADS | names.COPIES:
        return config_reads.content_of(call)
    if names.is_trainer(name):
        return make_trainer(reading, call, given=given_to(call))
    if names.is_called_trainer(name) and _takes_training_arguments(reading, call):
        return make_trainer(reading, call)
    is_loaded = last in ("from_pretrained", "from_config")
    if names.is_pipeline(owner if is_loaded else name):
        return _make_pipeline(call)
    if is_loaded and names.is_model_class(owner):
        return _load_model(reading, name, call)
    if names.is_model_class(name) and not names.is_auto_class(name):
        return reading.make_model(node, source=ModelConstructor.CLASS)
    if name in _PLAIN_MODELS or names.is_diffusers_model(owner if is_loaded else name):
        mark_escaped(call.arguments)
        made = reading.make_model(node, source=ModelConstructor.OWN_CLASS)
        weights.load(made, call)
        return made
    if name in _ADAPTS | _SAME_WEIGHTS:
        return _reshape(reading, name, call)
    if name == "deepspeed.initialize":
        return _initialize(reading, call)
    if name == "torch.autograd.grad" and call.keywords.get("create_graph") == Constant(True):
        reading.record(Action.DIFFERENTIATE_TWICE, node)
    if name in names.REDUCTIONS:
        _record_gather(reading, call, is_of_tensors=name in names.TENSOR_GATHERS)
    elif name in _CLIP:
        _record_clip(reading, call)
    elif name == "torch.utils.data.DataLoader":
        has_sampler = bool(given_to(call) & {"sampler", "batch_sampler", "**"})
        return TrackedObject(
            kind=ObjectKind.LOADER, node=node, has_batch_size=_has_batch_size(call), has_sampler=has_sampler
        )
    elif last == "cycle" and (iterator := iterator_over(call)) is not None:
        return iterator
    else:
        mark_escaped(call.values)
        config_reads.mark_changed(call.values, last)
        return _make_optimizer(reading, name, call)
    return None


def _record_dummy_scheduler(reading: Reading, call: CallSite) -> None:
    """Record accelerate's placeholder, and the condition under which the file has no scheduler."""
    tests = ((condition.test, condition.is_else) for condition in reading.conditions)
    wrong = next(
        (test for test, is_else in tests if lacks_section(test, reading.scope, is_else=is_else)), None
    )
    more = {"without_section": reading.text.snippet(wrong) if wrong is not None else None}
    reading.record_with_keywords(Action.MAKE_DUMMY_SCHEDULER, call, more=more)


def _has_batch_size(call: CallSite) -> bool:
    """Return False if a DataLoader gets a batch_sampler, or whole batches by batch_size=None."""
    is_given = len(call.arguments) > 1 or bool(given_to(call) & {"batch_size", "**"})
    has_sampler = call.keywords.get("batch_sampler", Constant(None)) != Constant(None)
    return call.value("batch_size", 1) != Constant(None) and (is_given or not has_sampler)


def _reshape(reading: Reading, name: str, call: CallSite) -> Value:
    model = call.value("model", 0)
    if not isinstance(model, TrackedObject) or model.kind is not ObjectKind.MODEL:
        return None
    shape = wrapped(model, call.node, model.state)
    model.root.has_open_weights |= name.endswith("kbit_training")  # it makes the others fp32
    if name in _ADAPTS:
        shape.is_adapted, shape.frozen_by = True, None  # the new adapters train
    if name == "torch.compile":
        reading.record(Action.COMPILE, call.node, model)
        shape.is_compiled = True
    return shape


def _load_model(reading: Reading, name: str, call: CallSite) -> Value:
    owner, _, how = name.rpartition(".")
    stays_frozen = names.is_peft_model(owner) and _stays_frozen(call) and not reading.conditions
    frozen_by = call.node if stays_frozen else None
    base = call.value("model", 0)
    if isinstance(base, TrackedObject) and base.kind is ObjectKind.MODEL:
        adapted = wrapped(base, call.node, base.state)
        adapted.is_adapted, adapted.frozen_by = True, frozen_by
        return adapted
    source = ModelConstructor.PRETRAINED if how == "from_pretrained" else ModelConstructor.CONFIG
    given = given_to(call) | model_options.flags_given(reading, call)
    loaded = reading.make_model(call.node, source=source, keywords=reading.keywords_of(call), given=given)
    loaded.frozen_by = frozen_by
    loaded.device_map = model_options.device_map_argument(reading, call)
    loaded.quantization = model_options.quantization(reading, call)
    weights.load(loaded, call)
    return loaded


def _stays_frozen(call: CallSite) -> bool:
    """Return True if adapters are loaded without is_trainable, which is the third or fourth argument."""
    trains = call.keywords.get("is_trainable", Constant(False))
    is_false = isinstance(trains, Constant) and trains.value is False
    return is_false and len(call.arguments) < 3 and "**" not in given_to(call)


def _make_pipeline(call: CallSite) -> Value:
    """Return a pipeline as the model of the script's that it runs where it is called; None without one.

    Of several models it is one that trains, which ZeRO-3 has partitioned.
    """
    mark_escaped(call.values)
    held = [
        value for value in call.values if isinstance(value, TrackedObject) and value.kind is ObjectKind.MODEL
    ]
    held.sort(key=lambda model: model.state is ModelState.PLAIN)
    if not held:
        return None
    made = wrapped(held[0], call.node, held[0].state)
    made.is_in_pipeline = True
    return made


def _initialize(reading: Reading, call: CallSite) -> Value:
    model = call.value("model", 1)
    made = model if isinstance(model, TrackedObject) else None
    is_positional, given = len(call.arguments) > 2, given_to(call)
    has_optimizer = is_positional or bool(given & _GIVES_OPTIMIZER)
    is_given = is_positional or "optimizer" in given
    has_own = is_given and call.value("optimizer", 2) != Constant(None)
    more = {"has_optimizer": has_optimizer, "has_own_optimizer": has_own}
    reading.record_with_keywords(Action.INITIALIZE, call, made, more=more)
    if made is None or made.kind is not ObjectKind.MODEL:
        made = TrackedObject(kind=ObjectKind.MODEL, node=call.node)
    made.root.is_trained = True
    engine = wrapped(made, call.node, ModelState.ENGINE)
    return Several((engine, TrackedObject(kind=ObjectKind.OPTIMIZER, node=call.node), None, None))


def mark_escaped(values: Iterable[Value]) -> None:
    """Mark values as passed to code that is not analysed: they may be prepared or trained there."""
    for value in values:
        if isinstance(value, TrackedObject):
            value.root.has_escaped = True
        elif isinstance(value, Several):
            mark_escaped(value.values)
        elif isinstance(value, Mapping):
            mark_escaped(item for _, item in value.values)


def _make_optimizer(reading: Reading, name: str, call: CallSite) -> TrackedObject | None:
    parameters = call.expression("params", 0)
    takes_parameters = parameters is not None and ast.unparse(parameters).endswith(".parameters()")
    id_ = names.optimizer_id(name, takes_parameters=takes_parameters)
    if id_ is None or parameters is None or not isinstance(call.node, ast.Call):
        return None
    reading.optimizers[(call.node.lineno, call.node.col_offset)] = UsedOptimizer(
        id=id_, text=reading.text.quote(call.node.func), place=reading.text.snippet(call.node).place
    )
    params = call.value("params", 0)
    model = params.this if isinstance(params, Method) and params.name == "parameters" else None
    return TrackedObject(
        kind=ObjectKind.OPTIMIZER,
        node=call.node,
        of=model,
        made_under=frozenset(id(condition.test) for condition in reading.conditions),
        is_dummy=id_ == _DUMMY_OPTIMIZER,
    )


def _record_clip(reading: Reading, call: CallSite) -> None:
    """Record a clip_grad_norm_() with its maximum norm, as far as known."""
    parameters = call.value("parameters", 0)
    model = parameters.this if isinstance(parameters, Method) else None
    norm, shown = call.value("max_norm", 1), call.expression("max_norm", 1)
    if norm is None and isinstance(shown, ast.Attribute) and shown.attr in reading.defaults:
        norm = Constant(reading.defaults[shown.attr])
    call.keywords["max_norm"] = norm
    reading.record_with_keywords(Action.CLIP, call, model)


def _record_gather(reading: Reading, call: CallSite, *, is_of_tensors: bool) -> None:
    """Record a collective, and whether it gathers generated tokens as if all ranks had the same number."""
    values = call.values
    items = [item for value in values for item in (value.values if isinstance(value, Several) else (value,))]
    tokens = [item for item in items if isinstance(item, TrackedObject) and item.kind is ObjectKind.TOKENS]
    sure = Confidence.POSSIBLE if any(_has_open_length(item.given) for item in tokens) else Confidence.LIKELY
    more = {"new_tokens": sure if tokens and is_of_tensors else None}
    reading.record(Action.GATHER, call.node, more=more)


def _has_open_length(given: frozenset[str]) -> bool:
    """Return True if unknown settings may give all completions the same length."""
    return "generation_config" in given or ("**" in given and not given & _LONGEST)


def make_trainer(reading: Reading, call: CallSite, given: frozenset[str] = frozenset()) -> TrackedObject:
    """Record a Trainer, whose model is then one that trains; `given` are keywords of a library's class."""
    model = call.value("model", 0)
    tracked = TrackedObject(kind=ObjectKind.TRAINER, node=call.node)
    if isinstance(model, TrackedObject) and model.kind is ObjectKind.MODEL:
        model.root.is_trained = True
        tracked.of = model
        if "peft_config" in call.keywords:
            tracked.of = wrapped(model, call.node, model.state)
            tracked.of.is_adapted, tracked.of.frozen_by = True, None
    more = {"half_weights": weights.half_weights(reading, (tracked.of,), is_trainer=True)}
    keywords = reading.keywords_of(call)
    reading.record(Action.MAKE_TRAINER, call.node, tracked.of, given=given, keywords=keywords, more=more)
    return tracked


def _takes_training_arguments(reading: Reading, call: CallSite) -> bool:
    """Return True if a class of another module gets TrainingArguments, also those of a command line."""
    if any(isinstance(value, TrackedObject) and value.kind is ObjectKind.ARGUMENTS for value in call.values):
        return True
    is_given = "args" in call.keywords and call.keywords["args"] is None
    return is_given and any(seen.action is Action.PARSE_ARGUMENTS for seen in reading.calls)


def call_method(reading: Reading, method: Method, call: CallSite) -> Value:
    """Record a method call, and return its result, or the script's own method that it runs."""
    tracked, name = method.this, method.name
    if tracked.kind is ObjectKind.CONFIG:
        return config_reads.call_config(tracked, name, call)
    if tracked.kind is ObjectKind.ACCELERATOR:
        return _call_accelerator(reading, name, call)
    if tracked.kind is ObjectKind.MODEL:
        return _call_model(reading, method, call)
    if tracked.kind is ObjectKind.PARSER:
        return parsers.call_parser(reading, tracked, name, call)
    if tracked.kind is ObjectKind.TRAINER and name in _TRAINER_ACTIONS:
        reading.record(_TRAINER_ACTIONS[name], call.node, tracked)
    if tracked.kind is ObjectKind.TOKENS and name in _SAME_TENSOR:
        return tracked
    if tracked.kind is ObjectKind.SCALER and name == "step":
        optimizer = call.value("optimizer", 0)
        made = optimizer if isinstance(optimizer, TrackedObject) else None
        more = {"half_weights": weights.half_weights(reading, (made,))}
        reading.record(Action.STEP_SCALED, call.node, made, more=more)
    if tracked.kind is ObjectKind.SCHEDULER and name == "step":
        reading.record(Action.STEP_SCHEDULE, call.node, tracked)
        schedules.note_step(reading, tracked)
    if tracked.kind is ObjectKind.OPTIMIZER and name in ("step", "zero_grad"):
        reading.record(Action.STEP if name == "step" else Action.ZERO_GRAD, call.node, tracked)
    return None


def _call_model(reading: Reading, method: Method, call: CallSite) -> Value:
    tracked, name, node = method.this, method.name, call.node
    own = tracked.cls.method(name) if tracked.cls else None
    if name in ("state_dict", "load_state_dict", "save_pretrained") and (
        reading.is_in_foreign_trainer or tracked.is_adapted
    ):
        return None
    if name in _MODEL_ACTIONS and own is None:
        found = reading.record_with_keywords(_MODEL_ACTIONS[name], call, tracked)
        is_one = any(keyword.name == "max_new_tokens" and keyword.value == 1 for keyword in found)
        is_ragged = name == "generate" and not is_one and not given_to(call) & _SAME_LENGTH
        return TrackedObject(kind=ObjectKind.TOKENS, node=node, given=given_to(call)) if is_ragged else None
    if tracked.state is ModelState.ENGINE and name in _ENGINE_ACTIONS:
        reading.record(_ENGINE_ACTIONS[name], node, tracked)
    elif tracked.state is ModelState.ENGINE and name == "backward":
        reading.record(Action.BACKWARD, node, tracked, forwards=_forwards(reading))
    elif name in _MERGES:
        return wrapped(tracked.root, node, tracked.state)
    elif name in _SAME_MODEL:
        weights.cast(reading, tracked, name, call)
        return tracked
    elif name == "zero_grad":
        reading.record(Action.ZERO_GRAD, node, tracked)
    elif name == "parameters":
        return method  # needed for clip_grad_norm_()
    elif own is not None and tracked.cls:
        return LocalFunction(own, tracked.cls.scope, tracked)
    return None


def _call_accelerator(reading: Reading, name: str, call: CallSite) -> Value:
    first = call.value("model", 0)
    model = first if isinstance(first, TrackedObject) and first.kind is ObjectKind.MODEL else None
    if name in _PREPARE:
        return _prepare(reading, call, is_whole=name == "prepare")
    if name == "unwrap_model":
        return wrapped(model, call.node, ModelState.IN_ENGINE) if model and model.root.is_trained else model
    if name == "backward":
        reading.record(Action.BACKWARD, call.node, forwards=_forwards(reading))
    elif name == "clip_grad_norm_":
        _record_clip(reading, call)
    elif name == "clip_grad_value_":
        reading.record(Action.CLIP_VALUE, call.node)
    elif name in _GATHERS:
        _record_gather(reading, call, is_of_tensors="use_gather_object" not in call.keywords)
    elif name in _ACCELERATOR_ACTIONS:
        reading.record(_ACCELERATOR_ACTIONS[name], call.node, model)
    return None


def _prepare(reading: Reading, call: CallSite, *, is_whole: bool) -> Value:
    objects = [value for value in call.arguments if isinstance(value, TrackedObject)]
    models = [tracked for tracked in objects if tracked.kind is ObjectKind.MODEL]
    is_open = any(value is None or isinstance(value, Several) for value in call.arguments)
    loaders = [tracked for tracked in objects if tracked.kind is ObjectKind.LOADER]
    unsized = next((loader.node for loader in loaders if not loader.has_batch_size), None)
    is_known = all(isinstance(value, TrackedObject) and value.kind in _PREPARED for value in call.arguments)
    is_counted = is_whole and is_known and not reading.text.has("train_micro_batch_size_per_gpu")
    more = {
        "num_loaders": len(loaders) if is_counted else None,
        "unsized_loader": reading.text.snippet(unsized) if unsized and is_counted else None,
        "is_compiled": any(model.is_compiled for model in models),
        "num_models": len({id(model.root) for model in models}),
        "has_optimizer": is_open or any(tracked.kind is ObjectKind.OPTIMIZER for tracked in objects),
        "prepared": _optimizers_and_schedulers(reading, objects) if is_whole else (),
        "has_unknown": not (is_whole and is_known) or reading.text.has(*_OF_DEEPSPEED),
        "half_weights": weights.half_weights(reading, call.arguments),
        "iterator": next((reading.text.snippet(made.node) for made in objects if _hides_loader(made)), None),
    }
    reading.record(Action.PREPARE, call.node, models[0] if models else None, more=more)
    for node, value in zip(getattr(call.node, "args", ()), call.arguments, strict=False):
        if value is None and isinstance(node, (ast.Name, ast.Attribute)):
            _unknown_optimizer(reading, node).is_prepared = True
    prepared = tuple(_prepared(value, call.node) for value in call.arguments)
    return prepared[0] if len(prepared) == 1 else Several(prepared)


def _optimizers_and_schedulers(reading: Reading, objects: Iterable[TrackedObject]) -> tuple[Prepared, ...]:
    holding = {id(condition.test) for condition in reading.conditions}
    is_open = ContextEffect.GUARDED in reading.within or reading.text.has(*_OF_DEEPSPEED)
    return tuple(
        Prepared(
            made=reading.text.snippet(tracked.node),
            is_scheduler=tracked.kind is ObjectKind.SCHEDULER,
            is_dummy=tracked.is_dummy,
            is_certain=not (is_open or tracked.has_alternative or tracked.made_under - holding),
            given=tracked.given,
        )
        for tracked in objects
        if tracked.kind in (ObjectKind.OPTIMIZER, ObjectKind.SCHEDULER)
    )


def _hides_loader(tracked: TrackedObject) -> bool:
    """Return True for a generator over a DataLoader that nothing has split over the ranks."""
    loader = tracked.of if tracked.kind is ObjectKind.ITERATOR else None
    return loader is not None and not loader.is_prepared and not loader.has_sampler


def iterator_over(call: CallSite) -> TrackedObject | None:
    """Return the generator that a call makes of a DataLoader; None without one."""
    values = (value for value in call.values if isinstance(value, TrackedObject))
    loader = next((value for value in values if value.kind is ObjectKind.LOADER), None)
    if loader is None:
        return None
    return TrackedObject(kind=ObjectKind.ITERATOR, node=call.node, of=loader)


def _prepared(value: Value, node: ast.expr) -> Value:
    if isinstance(value, TrackedObject) and value.kind is ObjectKind.MODEL:
        value.root.is_trained = True
        return wrapped(value, node, ModelState.ENGINE)
    if isinstance(value, TrackedObject):
        value.is_prepared = True
    return value if isinstance(value, (Constant, TrackedObject)) else None


def _forwards(reading: Reading) -> tuple[RecordedCall, ...]:
    """Return the forward passes of one engine, with gradients, since the last backward in this loop."""
    found: list[RecordedCall] = []
    for seen in reversed(reading.calls):
        if seen.action is Action.BACKWARD or seen.loops != tuple(reading.loops):
            break
        has_gradients = ContextEffect.NO_GRADIENTS not in seen.within
        if seen.action is Action.FORWARD and seen.state is ModelState.ENGINE and has_gradients:
            found.insert(0, seen)
    return tuple(
        seen
        for seen in found
        if _root(seen) is _root(found[-1]) and not exclude(seen.conditions, found[-1].conditions)
    )


def _root(seen: RecordedCall) -> TrackedObject | None:
    return seen.tracked.root if seen.tracked else None
