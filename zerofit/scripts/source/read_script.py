"""A script's source to ScriptFacts."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from zerofit.core.command import Route
from zerofit.scripts.facts import Action, Model, ModelConstructor, ModelState, ScriptCall, ScriptFacts
from zerofit.scripts.flag_names import classes_of_parsers, dataclass_fields
from zerofit.scripts.source import model_options, names, weights
from zerofit.scripts.source.conditions import exclude, facts_of
from zerofit.scripts.source.config_reads import find_early_reads
from zerofit.scripts.source.gradients import find_cleared
from zerofit.scripts.source.interpreter import MAX_NODES, make_instance, read_block, run_function
from zerofit.scripts.source.reading import CallSite, ContextEffect, Reading
from zerofit.scripts.source.schedules import find_schedules
from zerofit.scripts.source.script_text import ScriptText, parse, too_deep
from zerofit.scripts.source.values import LocalClass, LocalFunction, ObjectKind, Scope, TrackedObject

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.scripts.facts import Snippet
    from zerofit.scripts.source.reading import Condition, RecordedCall

_NO_CALL = CallSite(node=ast.Constant(None))
"""Marks code of functions that the script does not call."""
_USES_MODEL = (Action.FORWARD, Action.GENERATE, Action.EVALUATE)
_PARTITIONED_WHEN_MADE = (ModelConstructor.PRETRAINED, ModelConstructor.CONFIG)
_UNFREEZES = ("requires_grad", "load_adapter", "add_adapter", "set_adapter")
"""Words of code that may make frozen adapters train."""
_VARIABLE = re.compile(r"[A-Z][A-Z0-9]*_[A-Z0-9_]+")
_SETS_UP = (
    Action.MAKE_ACCELERATOR,
    Action.MAKE_ARGUMENTS,
    Action.PARSE_ARGUMENTS,
    Action.MAKE_HF_CONFIG,
)


@lru_cache(maxsize=8)
def read_script(source: str, *, name: str) -> ScriptFacts:
    """Return the facts in a script's source.

    The last few results are cached: several checks read the same script, and --fix again in each round.

    Raises:
        Unreadable: this Python can't run it.
    """
    tree = parse(source)
    try:
        reading = Reading(text=ScriptText(source, name), scope=Scope())
        read_block(reading, tree.body)
        _read_uncalled_code(reading, tree)
        facts = _facts(reading, name)
        if model_options.handles_framework(tree):
            facts = replace(facts, models=tuple(replace(model, device_map=None) for model in facts.models))
        return replace(
            facts,
            parses_plain_arguments=_parses_plain_arguments(tree),
            parsed_fields=dataclass_fields(tree),
            variables=frozenset(_capitals(tree)),
            repeats_epochs=_repeats_epochs(tree),
        )
    except RecursionError:
        raise too_deep() from None


def _capitals(tree: ast.Module) -> Iterator[str]:
    """Yield the literals that may name environment variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _VARIABLE.fullmatch(node.value):
            yield node.value


def _repeats_epochs(tree: ast.Module) -> bool:
    """Return True if a loop counts epochs, and nothing is told of them."""
    nodes = list(ast.walk(tree))
    if any(isinstance(node, ast.Attribute) and node.attr == "set_epoch" for node in nodes):
        return False
    loops = (node for node in nodes if isinstance(node, ast.For))
    return any("epoch" in f"{ast.unparse(loop.target)} {ast.unparse(loop.iter)}".lower() for loop in loops)


def _parses_plain_arguments(tree: ast.Module) -> bool:
    """Return True if HfArgumentParser makes transformers' own class of the command line."""
    nodes = list(ast.walk(tree))
    called = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    if "parse_args_into_dataclasses" not in called:
        return False
    imported = {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "transformers"
        for alias in node.names
        if alias.name in names.PLAIN_ARGUMENTS
    } | {f"transformers.{name}" for name in names.PLAIN_ARGUMENTS}
    own = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    return bool(classes_of_parsers(tree) & (imported - own))


def _read_uncalled_code(reading: Reading, tree: ast.Module) -> None:
    """Interpret the functions and classes that the module's body does not use, as if they were called."""
    used = {
        node.id for function in tree.body if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function) if isinstance(node, ast.Name)
    }  # fmt: skip
    values = list(reading.scope.names.items())
    for is_first in (True, False):
        for name, value in values:
            if (name not in used) is not is_first or reading.num_nodes > MAX_NODES:
                continue
            reading.root += 1
            reading.conditions.clear()
            reading.has_foreign_accelerator = False
            if isinstance(value, LocalFunction) and value.node not in reading.visited:
                run_function(reading, value, _NO_CALL)
            elif isinstance(value, LocalClass):
                _read_class(reading, value)


def _read_class(reading: Reading, cls: LocalClass) -> None:
    methods = [item for item in cls.node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))]
    if not methods or all(method in reading.visited for method in methods):
        return
    call = ast.copy_location(ast.Call(func=ast.Name(id=cls.node.name), args=[], keywords=[]), cls.node)
    num_calls, num_models = len(reading.calls), len(reading.models)
    this = make_instance(reading, cls, CallSite(node=call))
    if this.kind is not ObjectKind.OTHER:
        # Nothing here creates it: its arguments do not come from the script.
        del reading.calls[num_calls:], reading.models[num_models:]
    this.has_escaped = True
    reading.is_in_foreign_trainer = this.kind is ObjectKind.TRAINER
    for method in methods:
        if method not in reading.visited:
            reading.root += 1
            run_function(reading, LocalFunction(method, cls.scope, this), _NO_CALL)
    reading.is_in_foreign_trainer = False


def _facts(reading: Reading, name: str) -> ScriptFacts:
    models = tuple(_model(reading, tracked) for tracked in reading.models)
    return ScriptFacts(
        name=name,
        route=_route(reading),
        optimizers=tuple(reading.optimizers.values()),
        accelerator_keywords=tuple(dict.fromkeys(reading.accelerator_keywords)),
        accelerator_arguments=tuple(dict.fromkeys(reading.accelerator_arguments)),
        training_arguments=tuple(dict.fromkeys(reading.training_arguments)),
        parsed_training_arguments=tuple(dict.fromkeys(reading.parsed_training_arguments)),
        calls=tuple(dict.fromkeys(_call(reading, seen) for seen in reading.calls)),
        models=models,
        schedules=tuple(dict.fromkeys(find_schedules(reading))),
        loads_states=any(seen.action is Action.LOAD_STATE for seen in reading.calls),
        arguments=tuple(argument for argument in reading.arguments.values() if argument is not None),
        early_reads=tuple(dict.fromkeys(find_early_reads(reading))),
        sets_accumulation=reading.sets_accumulation,
    )


def _route(reading: Reading) -> Route | None:
    actions = {seen.action for seen in reading.calls}
    found = {
        route
        for action, route in (
            (Action.MAKE_ACCELERATOR, Route.ACCELERATE),
            (Action.MAKE_TRAINER, Route.TRAINER),
            (Action.INITIALIZE, Route.NATIVE),
        )
        if action in actions
    }
    return found.pop() if len(found) == 1 else None


def _model(reading: Reading, tracked: TrackedObject) -> Model:
    made = next(seen for seen in reading.calls[tracked.order :] if seen.tracked is tracked)
    root = made.root
    set_up = [seen for seen in reading.calls[: tracked.order] if seen.action in _SETS_UP]
    later = next(
        (seen for seen in reading.calls[tracked.order :] if seen.action in _SETS_UP and seen.root == root),
        None,
    )
    is_open = bool(set_up) or (root > 0 and reading.has_foreign_accelerator)
    return Model(
        made=reading.text.snippet(tracked.node),
        source=tracked.source or ModelConstructor.OWN_CLASS,
        keywords=tracked.keywords,
        is_trained=tracked.is_trained,
        is_in_zero_init=tracked.is_in_zero_init,
        later_setup=reading.text.snippet(later.node) if later and not is_open else None,
        is_before_setup=all(seen.root != root for seen in set_up),
        device_map=tracked.device_map,
        quantization=tracked.quantization,
        bf16_weights=weights.bf16_weights(reading, tracked),
        is_always_after_setup=not (made.conditions or made.loops or root)
        and any(seen.root == 0 and not seen.conditions and not seen.loops for seen in set_up),
    )


def _call(reading: Reading, seen: RecordedCall) -> ScriptCall:
    every = next(
        (
            condition
            for condition in reversed(seen.conditions)
            if condition.has_remainder and condition.depth == len(seen.loops) > 0
        ),
        None,
    )
    one_rank = _one_rank(reading, seen)
    return ScriptCall(
        action=seen.action,
        seen=reading.text.snippet(seen.node),
        state=seen.state,
        one_rank=reading.text.snippet(one_rank.test) if one_rank else None,
        is_otherwise=one_rank is not None and one_rank.is_else,
        is_engine_checked=any(condition.is_about_framework for condition in seen.conditions),
        is_gathered=ContextEffect.GATHERED in seen.within,
        is_in_inference_mode=ContextEffect.INFERENCE_MODE in seen.within,
        share=reading.text.snippet(seen.share) if seen.share else None,
        trains_before=_trains(reading, seen, afterwards=False),
        trains_after=_trains(reading, seen, afterwards=True),
        is_in_each_training=_is_in_each_training(reading, seen),
        is_outside_engine=_is_outside_engine(reading, seen),
        is_conditional=bool(seen.conditions),
        is_in_each_run=not (seen.conditions or seen.loops or seen.root),
        needs=frozenset().union(*(condition.needs for condition in seen.conditions)),
        every_few_steps=reading.text.snippet(every.test) if every else None,
        loop=seen.loops[-1] if seen.loops else None,
        keywords=seen.keywords,
        given=seen.given,
        forwards=tuple(reading.text.snippet(forward.node) for forward in seen.forwards),
        clears=find_cleared(reading, seen),
        frozen_by=_frozen_by(reading, seen),
        **seen.more,
    )


def _one_rank(reading: Reading, seen: RecordedCall) -> Condition | None:
    """Return the condition under which only the main rank reaches a call."""
    for condition in seen.conditions:
        is_main = condition.rank is not None and condition.rank.is_main
        if is_main and not any(_is_counterpart(other, seen, condition) for other in reading.calls):
            return condition
    return None


def _is_counterpart(other: RecordedCall, seen: RecordedCall, condition: Condition) -> bool:
    """Return True if the other ranks do the same: in the `else` branch, or anywhere for a barrier."""
    if other.action is not seen.action:
        return False
    return any(
        mate.rank is not None
        and not mate.rank.is_main
        and (mate.test is condition.test or seen.action in (Action.WAIT, Action.GATHER))
        for mate in other.conditions
    )


def _trains(reading: Reading, seen: RecordedCall, *, afterwards: bool) -> bool:
    """Return True if the script trains before or after a call: by its Trainer, or any custom loop."""
    if seen.action is Action.MAKE_TRAINER:
        trainers = [other.tracked for other in reading.calls if other.action is Action.TRAIN]
        return afterwards and any(trainer is not None and trainer.node is seen.node for trainer in trainers)
    if seen.action not in _USES_MODEL:
        return False
    place = reading.calls.index(seen)
    others = reading.calls[place + 1 :] if afterwards else reading.calls[:place]
    if seen.action is Action.EVALUATE:
        trains = _trainings(reading, seen)
        instead = [other for other in trains if _exclude_each_other(other, seen)]
        if afterwards:
            return any(other in others and other not in instead for other in trains)
        may_have = seen.tracked is not None and _trains_unseen(seen.tracked)
        return may_have or bool(instead) or any(other in others for other in trains)
    in_same_loop = (other for other in reading.calls if set(other.loops) & set(seen.loops))
    return any(other.action is Action.BACKWARD for other in (*others, *in_same_loop))


def _trainings(reading: Reading, seen: RecordedCall) -> list[RecordedCall]:
    return [
        other for other in reading.calls if other.action is Action.TRAIN and other.tracked is seen.tracked
    ]


def _exclude_each_other(first: RecordedCall, second: RecordedCall) -> bool:
    """Return True if no run of the script makes both calls; conditions inside loops may change."""
    sides = [[condition for condition in seen.conditions if condition.depth == 0] for seen in (first, second)]
    return exclude(*sides)


def _is_in_each_training(reading: Reading, seen: RecordedCall) -> bool:
    """Return True if every run of the script that trains a Trainer also makes this call with it."""
    if seen.action is not Action.EVALUATE:
        return False
    needed = facts_of(seen.conditions)
    return all(needed <= facts_of(other.conditions) for other in _trainings(reading, seen))


def _trains_unseen(trainer: TrackedObject) -> bool:
    has_own_way = trainer.cls is not None and trainer.cls.method("train") is not None
    return trainer.has_escaped or has_own_way


def _is_outside_engine(reading: Reading, seen: RecordedCall) -> bool:
    """Return True if a call runs a model that ZeRO-3 partitions at construction and that is in no engine."""
    model = seen.tracked.root if seen.tracked and seen.action in (Action.FORWARD, Action.GENERATE) else None
    if model is None or seen.state is not ModelState.PLAIN or model.source not in _PARTITIONED_WHEN_MADE:
        return False
    sets_up = any(
        other.action in _SETS_UP and other.root == seen.root for other in reading.calls[: model.order]
    )
    return sets_up and not (model.is_in_zero_init or model.is_under_zero_context or model.has_escaped)


def _frozen_by(reading: Reading, seen: RecordedCall) -> Snippet | None:
    """Return the call that loaded the model's adapters frozen, if nothing may have unfrozen them."""
    tracked = seen.tracked
    if tracked is None or tracked.frozen_by is None or tracked.root.has_escaped:
        return None
    return None if reading.text.has(*_UNFREEZES) else reading.text.snippet(tracked.frozen_by)
