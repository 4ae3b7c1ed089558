"""Calls of a script: what each makes, and what it does to models, engines and trainers."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from zerofit.core.setting import Confidence
from zerofit.scripts.facts import Action, ModelSource, ModelState, UsedOptimizer
from zerofit.scripts.source import expressions, names, parsers
from zerofit.scripts.source import statements as walk
from zerofit.scripts.source.accelerator import call_accelerator, found_forwards
from zerofit.scripts.source.reading import wrapped
from zerofit.scripts.source.shares import own_or
from zerofit.scripts.source.values import (
    Constant,
    Dotted,
    Kind,
    LocalClass,
    LocalFunction,
    Mapping,
    Method,
    Several,
    Thing,
    Value,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zerofit.scripts.source.reading import Reading

_SAME_MODEL = {
    "to", "cuda", "cpu", "eval", "train", "half", "bfloat16", "float", "requires_grad_", "apply",
}  # fmt: skip
_MODEL_ACTIONS = {
    "generate": Action.GENERATE,
    "save_pretrained": Action.SAVE_PRETRAINED,
    "resize_token_embeddings": Action.RESIZE,
    "gradient_checkpointing_enable": Action.CHECKPOINT_ACTIVATIONS,
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
_WRAPPERS = {
    "peft.get_peft_model",
    "peft.mapping.get_peft_model",
    "peft.prepare_model_for_kbit_training",
    "peft.utils.prepare_model_for_kbit_training",
}
_SAME_TENSOR = {"to", "cpu", "cuda", "contiguous", "clone", "detach", "int", "long"}
_SAME_LENGTH = {"min_new_tokens", "min_length"}
"""Settings with which each rank may generate as many tokens as the others."""
_LONGEST = {"max_new_tokens", "max_length"}
"""Settings beside which `**inputs` is what the tokenizer made, and no further settings."""
_GIVES_OPTIMIZER = {"optimizer", "model_parameters", "**"}
"""Of deepspeed.initialize(): parameters come with an optimizer of the configuration."""
_CLIP = {"torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad.clip_grad_norm_"}
_PLAIN_MODELS = {"torch.nn.Sequential", "torch.nn.Linear"}


def evaluate_call(reading: Reading, node: ast.Call) -> Value:
    """Note a call and those in its arguments; return what it returns."""
    callee = expressions.evaluate(reading, node.func)
    arguments: list[Value] = []
    for argument in node.args:
        value = expressions.evaluate(reading, argument)
        if isinstance(argument, ast.Starred):
            arguments += value.values if isinstance(value, Several) else [None]
        else:
            arguments.append(value)
    keywords: dict[str, Value] = {}
    for keyword in node.keywords:
        value = expressions.evaluate(reading, keyword.value)
        if keyword.arg is not None:
            keywords[keyword.arg] = value
        elif isinstance(value, Mapping):
            keywords |= dict(value.values)
    is_adding = isinstance(callee, Dotted) and callee.name in names.DEEPSPEED_ARGUMENTS
    if not isinstance(callee, LocalFunction) and not is_adding:
        parsers.hand_on((*arguments, *keywords.values()))
    match callee:
        case Dotted():
            return _call_dotted(reading, callee.name, node, arguments, keywords)
        case LocalFunction():
            for place, argument in enumerate(node.args[: len(arguments)]):
                arguments[place] = own_or(arguments[place], argument, reading.scope)
            return walk.run_function(reading, callee, arguments, keywords)
        case LocalClass():
            return walk.make_instance(reading, callee, node, arguments, keywords)
        case Method():
            return _call_method(reading, callee, node, arguments, keywords)
        case Thing(kind=Kind.MODEL):
            reading.see(Action.FORWARD, node, callee)
            return None
    return _call_unknown(reading, node, arguments, keywords)


def _call_unknown(
    reading: Reading, node: ast.Call, arguments: list[Value], keywords: dict[str, Value]
) -> Value:
    hand_on((*arguments, *keywords.values()))
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in names.PARSE_CALLS or name == "parse_args_and_config":
        reading.see(Action.PARSE_ARGUMENTS, node)
    if name == "dict" and not arguments:
        return Mapping(tuple(keywords.items()))
    if name == "add_argument":
        parsers.see_default(reading, arguments, keywords)
    if name == "backward" and isinstance(node.func, ast.Attribute) and not node.args:
        reading.see(Action.BACKWARD_OF_LOSS, node)
    return None


def _call_dotted(
    reading: Reading, name: str, node: ast.Call, arguments: list[Value], keywords: dict[str, Value]
) -> Value:
    owner, _, last = name.rpartition(".")
    first = arguments[0] if arguments else None
    if name in names.ACCELERATORS:
        found, given = reading.keywords_of(node, keywords)
        reading.accelerator_keywords += found
        reading.see(Action.MAKE_ACCELERATOR, node, keywords=found, given=given)
        return Thing(kind=Kind.ACCELERATOR, node=node)
    if names.is_arguments(name):
        found, given = reading.keywords_of(node, keywords)
        reading.training_arguments += found
        reading.see(Action.MAKE_ARGUMENTS, node, keywords=found, given=given)
        return Thing(kind=Kind.ARGUMENTS, node=node)
    if name in names.PLUGINS:
        found, given = reading.keywords_of(node, keywords)
        reading.see(Action.MAKE_PLUGIN, node, keywords=found, given=given)
        return None
    if name in names.ARGUMENT_PARSERS:
        return parsers.make_parser(node)
    if name in names.DEEPSPEED_ARGUMENTS:
        return first
    if last == "HfDeepSpeedConfig":
        reading.see(Action.MAKE_HF_CONFIG, node)
        return None
    if names.is_trainer(name):
        return make_trainer(reading, node, arguments, keywords)
    if last in ("from_pretrained", "from_config") and names.is_model_class(owner):
        return _load_model(reading, owner, last, node, arguments, keywords)
    if names.is_model_class(name) and not names.is_auto_class(name):
        return reading.make_model(node, source=ModelSource.CLASS)
    if name in _PLAIN_MODELS:
        hand_on(arguments)
        return reading.make_model(node, source=ModelSource.OWN_CLASS)
    if name in _WRAPPERS or name == "torch.compile":
        model = first or keywords.get("model")
        if not isinstance(model, Thing) or model.kind is not Kind.MODEL:
            return None
        if name == "torch.compile":
            reading.see(Action.COMPILE, node, model)
        shape = wrapped(model, node, model.state, is_compiled=name == "torch.compile")
        shape.is_adapted |= name.endswith("get_peft_model")
        return shape
    if name == "deepspeed.initialize":
        return _initialize(reading, node, arguments, keywords)
    if name in names.PARSERS:
        return None
    if name in names.GENERATES:
        found, given = reading.keywords_of(node, keywords)
        reading.see(Action.GENERATE_TOGETHER, node, keywords=found, given=given)
        return None
    return _call_other(reading, name, node, arguments, keywords)


def _load_model(
    reading: Reading,
    owner: str,
    how: str,
    node: ast.Call,
    arguments: list[Value],
    keywords: dict[str, Value],
) -> Value:
    first = arguments[0] if arguments else keywords.get("model")
    if isinstance(first, Thing) and first.kind is Kind.MODEL:
        adapted = wrapped(first, node, first.state)
        adapted.is_adapted = True
        return adapted
    found, given = reading.keywords_of(node, keywords)
    source = ModelSource.PRETRAINED if how == "from_pretrained" else ModelSource.CONFIG
    return reading.make_model(node, source=source, keywords=found, given=given)


def _initialize(
    reading: Reading, node: ast.Call, arguments: list[Value], keywords: dict[str, Value]
) -> Value:
    model = keywords.get("model") or (arguments[1] if len(arguments) > 1 else None)
    found, given = reading.keywords_of(node, keywords)
    made = model if isinstance(model, Thing) else None
    has_optimizer = len(arguments) > 2 or bool(given & _GIVES_OPTIMIZER)
    more = {"has_optimizer": has_optimizer}
    reading.see(Action.INITIALIZE, node, made, keywords=found, given=given, more=more)
    if not isinstance(model, Thing) or model.kind is not Kind.MODEL:
        model = Thing(kind=Kind.MODEL, node=node)
    model.root.is_trained = True
    engine = wrapped(model, node, ModelState.ENGINE)
    return Several((engine, Thing(kind=Kind.OPTIMIZER, node=node), None, None))


def _call_other(
    reading: Reading, name: str, node: ast.Call, arguments: list[Value], keywords: dict[str, Value]
) -> Value:
    first = arguments[0] if arguments else None
    if name in names.BARRIERS:
        reading.see(Action.WAIT, node)
    elif name in names.REDUCTIONS:
        see_gather(
            reading, node, (*arguments, *keywords.values()), is_of_tensors=name in names.TENSOR_GATHERS
        )
    elif name in names.GATHERED:
        reading.see(Action.GATHER_PARAMETERS, node)
    elif name in names.LEAF_MODULES:
        reading.see(Action.SET_LEAF_MODULES, node)
    elif name in _CLIP:
        see_clip(reading, node, arguments, keywords)
    elif name == "torch.utils.data.DataLoader":
        return Thing(kind=Kind.LOADER, node=node)
    elif names.is_scheduler(name):
        return _make_scheduler(reading, name, node)
    else:
        hand_on((*arguments, *keywords.values()))
        return _make_optimizer(reading, name, node, first, keywords)
    return None


def hand_on(values: Iterable[Value]) -> None:
    """Note that these values go where they are not followed: they may be prepared or trained there."""
    for value in values:
        if isinstance(value, Thing):
            value.root.is_handed_on = True
        elif isinstance(value, Several):
            hand_on(value.values)
        elif isinstance(value, Mapping):
            hand_on(item for _, item in value.values)


def _make_scheduler(reading: Reading, name: str, node: ast.Call) -> Thing:
    wanted, position = names.steps_argument(name)
    total = next((keyword.value for keyword in node.keywords if keyword.arg in wanted), None)
    if total is None and position is not None and position < len(node.args):
        total = node.args[position]
    return Thing(kind=Kind.SCHEDULER, node=node, total=total, scope=reading.scope)


def _make_optimizer(
    reading: Reading, name: str, node: ast.Call, first: Value, keywords: dict[str, Value]
) -> Thing | None:
    shown = node.args[0] if node.args else next((k.value for k in node.keywords if k.arg == "params"), None)
    takes_parameters = shown is not None and ast.unparse(shown).endswith(".parameters()")
    id_ = names.optimizer_id(name, takes_parameters=takes_parameters)
    if id_ is None or shown is None:
        return None
    sight = reading.source.sight(node)
    reading.optimizers[(node.lineno, node.col_offset)] = UsedOptimizer(
        id=id_, line=sight.place.line, column=sight.place.column, text=reading.source.quote(node.func)
    )
    return Thing(kind=Kind.OPTIMIZER, node=node)


def see_clip(reading: Reading, node: ast.Call, arguments: list[Value], keywords: dict[str, Value]) -> None:
    """Note a clip_grad_norm_() with its largest norm, as far as it is known."""
    parameters = node.args[0] if node.args else None
    model = None
    if isinstance(parameters, ast.Call) and isinstance(parameters.func, ast.Attribute):
        model = expressions.evaluate(reading, parameters.func.value)
    norm = keywords.get("max_norm") or (arguments[1] if len(arguments) > 1 else None)
    shown = (
        node.args[1]
        if len(node.args) > 1
        else next((k.value for k in node.keywords if k.arg == "max_norm"), None)
    )
    if norm is None and isinstance(shown, ast.Attribute) and shown.attr in reading.defaults:
        norm = Constant(reading.defaults[shown.attr])
    found, given = reading.keywords_of(node, {"max_norm": norm})
    thing = model if isinstance(model, Thing) and model.kind is Kind.MODEL else None
    reading.see(Action.CLIP, node, thing, keywords=found, given=given)


def see_gather(reading: Reading, node: ast.Call, values: Iterable[Value], *, is_of_tensors: bool) -> None:
    """Note a collective, and whether it takes new tokens as if all ranks had as many."""
    items = [item for value in values for item in (value.values if isinstance(value, Several) else (value,))]
    tokens = [item for item in items if isinstance(item, Thing) and item.kind is Kind.TOKENS]
    sure = Confidence.POSSIBLE if any(_has_open_length(item.given) for item in tokens) else Confidence.LIKELY
    reading.see(Action.GATHER, node, more={"new_tokens": sure if tokens and is_of_tensors else None})


def _has_open_length(given: frozenset[str]) -> bool:
    """Return whether settings that are not seen here may give all completions one length."""
    return "generation_config" in given or ("**" in given and not given & _LONGEST)


def make_trainer(
    reading: Reading, node: ast.expr, arguments: list[Value], keywords: dict[str, Value]
) -> Thing:
    """Note a Trainer, whose model is now one that trains."""
    model = keywords.get("model") or (arguments[0] if arguments else None)
    thing = Thing(kind=Kind.TRAINER, node=node)
    if isinstance(model, Thing) and model.kind is Kind.MODEL:
        model.root.is_trained = True
        thing.of = model
        if "peft_config" in keywords:
            thing.of = wrapped(model, node, model.state)
            thing.of.is_adapted = True
    reading.see(Action.MAKE_TRAINER, node, thing.of)
    return thing


def _call_method(
    reading: Reading, method: Method, node: ast.Call, arguments: list[Value], keywords: dict[str, Value]
) -> Value:
    thing, name = method.this, method.name
    if thing.kind is Kind.ACCELERATOR:
        return call_accelerator(reading, name, node, arguments, keywords)
    if thing.kind is Kind.MODEL:
        return _call_model(reading, thing, name, node, keywords)
    if thing.kind is Kind.PARSER:
        return parsers.call_parser(reading, thing, name, node, arguments, keywords)
    if thing.kind is Kind.TRAINER and name in _TRAINER_ACTIONS:
        reading.see(_TRAINER_ACTIONS[name], node, thing)
    if thing.kind is Kind.TOKENS and name in _SAME_TENSOR:
        return thing
    if thing.kind is Kind.OPTIMIZER and name == "step":
        reading.see(Action.STEP, node)
    return None


def _call_model(
    reading: Reading, thing: Thing, name: str, node: ast.Call, keywords: dict[str, Value]
) -> Value:
    found, given = reading.keywords_of(node, keywords)
    if any(keyword.arg is None for keyword in node.keywords):
        given |= {"**"}
    method = thing.cls.method(name) if thing.cls else None
    if name in ("state_dict", "save_pretrained") and (reading.is_in_foreign_trainer or thing.is_adapted):
        return None
    if name in _MODEL_ACTIONS and method is None:
        reading.see(_MODEL_ACTIONS[name], node, thing, keywords=found, given=given)
        is_one = any(keyword.name == "max_new_tokens" and keyword.value == 1 for keyword in found)
        is_ragged = name == "generate" and not is_one and not given & _SAME_LENGTH
        return Thing(kind=Kind.TOKENS, node=node, given=given) if is_ragged else None
    if name == "state_dict" and method is None:
        reading.see(Action.STATE_DICT, node, thing)
        return Thing(kind=Kind.STATE_DICT, node=node)
    if thing.state is ModelState.ENGINE and name in _ENGINE_ACTIONS:
        reading.see(_ENGINE_ACTIONS[name], node, thing)
    elif thing.state is ModelState.ENGINE and name == "backward":
        reading.see(Action.BACKWARD, node, thing, forwards=found_forwards(reading))
    elif name in _SAME_MODEL:
        return thing
    elif method is not None and thing.cls:
        return walk.run_function(
            reading, LocalFunction(method, thing.cls.scope, thing), [None] * len(node.args), keywords
        )
    return None
