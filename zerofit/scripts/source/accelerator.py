"""Methods of an Accelerator: what each does, and what prepare() makes of its arguments."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from zerofit.scripts.facts import Action, ModelState
from zerofit.scripts.source import calls
from zerofit.scripts.source.conditions import exclude
from zerofit.scripts.source.reading import wrapped
from zerofit.scripts.source.values import Constant, Kind, Several, Thing

if TYPE_CHECKING:
    from zerofit.scripts.source.reading import Reading, Seen
    from zerofit.scripts.source.values import Value

_ACTIONS = {
    "save_state": Action.SAVE_STATE,
    "wait_for_everyone": Action.WAIT,
    "reduce": Action.GATHER,
    "pad_across_processes": Action.GATHER,
}
_GATHERS = {"gather", "gather_for_metrics"}
_MODEL_ACTIONS = {"save_model": Action.SAVE_MODEL, "get_state_dict": Action.GET_STATE_DICT}
_PREPARE = {"prepare", "prepare_model", "prepare_optimizer", "prepare_scheduler"}


def call_accelerator(
    reading: Reading, name: str, node: ast.Call, arguments: list[Value], keywords: dict[str, Value]
) -> Value:
    """Note a method of an Accelerator; return what it returns."""
    first = arguments[0] if arguments else keywords.get("model")
    model = first if isinstance(first, Thing) and first.kind is Kind.MODEL else None
    if name in _PREPARE:
        return _prepare(reading, node, arguments)
    if name == "unwrap_model":
        return wrapped(model, node, ModelState.IN_ENGINE) if model and model.root.is_trained else model
    if name == "backward":
        reading.see(Action.BACKWARD, node, forwards=found_forwards(reading))
    elif name == "clip_grad_norm_":
        calls.see_clip(reading, node, arguments, keywords)
    elif name in _MODEL_ACTIONS:
        reading.see(_MODEL_ACTIONS[name], node, model)
        return Thing(kind=Kind.STATE_DICT, node=node)
    elif name in _GATHERS:
        is_of_tensors = "use_gather_object" not in keywords
        calls.see_gather(reading, node, (*arguments, *keywords.values()), is_of_tensors=is_of_tensors)
    elif name in _ACTIONS:
        reading.see(_ACTIONS[name], node)
    return None


def _prepare(reading: Reading, node: ast.Call, arguments: list[Value]) -> Value:
    things = [value for value in arguments if isinstance(value, Thing)]
    models = [thing for thing in things if thing.kind is Kind.MODEL]
    is_open = any(value is None or isinstance(value, Several) for value in arguments)
    reading.see(
        Action.PREPARE,
        node,
        models[0] if models else None,
        more={
            "is_compiled": any(model.is_compiled for model in models),
            "num_models": len({id(model.root) for model in models}),
            "has_optimizer": is_open or any(thing.kind is Kind.OPTIMIZER for thing in things),
        },
    )
    prepared = tuple(_prepared(reading, value, node) for value in arguments)
    return prepared[0] if len(prepared) == 1 else Several(prepared)


def _prepared(reading: Reading, value: Value, node: ast.Call) -> Value:
    if not isinstance(value, Thing):
        return value if isinstance(value, Constant) else None
    if value.kind is Kind.MODEL:
        value.root.is_trained = True
        return wrapped(value, node, ModelState.ENGINE)
    if value.kind is Kind.SCHEDULER:
        reading.schedulers.append(value)
    return value


def found_forwards(reading: Reading) -> tuple[Seen, ...]:
    """Return the forward passes of one engine, with gradients, since the last backward in this loop."""
    found: list[Seen] = []
    for seen in reversed(reading.calls):
        if seen.action is Action.BACKWARD or seen.loops != tuple(reading.loops):
            break
        if seen.action is Action.FORWARD and seen.state is ModelState.ENGINE and seen.has_gradients:
            found.insert(0, seen)
    last = found[-1] if found else None
    return tuple(
        seen
        for seen in found
        if last
        and seen.thing
        and last.thing
        and seen.thing.root is last.thing.root
        and not exclude(seen.conditions, last.conditions)
    )
