"""The number format of a model's weights, as far as the source shows it, and what gathers copies of them."""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import TYPE_CHECKING

from zerofit.core.setting import Confidence, Said
from zerofit.scripts.facts import Action
from zerofit.scripts.source.conditions import is_fp16_test
from zerofit.scripts.source.reading import given_to
from zerofit.scripts.source.values import (
    Constant,
    Dotted,
    HalfOfRun,
    LocalFunction,
    ObjectKind,
    TrackedObject,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from zerofit.scripts.facts import Snippet
    from zerofit.scripts.source.reading import CallSite, Reading
    from zerofit.scripts.source.values import Value

_HALF = {"torch.float16", "torch.half"}
_BF16 = (Dotted("torch.bfloat16"), Constant("bfloat16"))
_WIDENS = {"float", "double", "bfloat16"}
_DTYPES = ("dtype", "torch_dtype")
"""Of from_pretrained(); the second is its name before transformers 5."""
_QUANTIZES = {"quantization_config", "load_in_8bit", "load_in_4bit", "**"}
_IN_PARTS = ("parameters", "named_parameters", "modules", "named_modules")
"""Methods of a model by which a script reaches some of its weights."""
_UPCASTS = ("cast_training_params", "upcast", "keep_in_fp32", "float32_params")
"""Words of code that makes some weights fp32."""


def is_half(value: Value) -> bool:
    """Return True if a number format is fp16, at least under fp16 mixed precision."""
    is_name = isinstance(value, Dotted) and value.name in _HALF
    return is_name or isinstance(value, HalfOfRun) or value == Constant("float16")


def load(model: TrackedObject, call: CallSite) -> None:
    """Note the format that from_pretrained() loads a model in."""
    model.has_open_weights = bool(
        given_to(call) & {"quantization_config", "load_in_8bit", "load_in_4bit", "**"}
    )
    if any(is_half(call.keywords.get(name)) for name in _DTYPES):
        model.half_by = call.node
    if any(call.keywords.get(name) in _BF16 for name in _DTYPES):
        model.bf16_by = call.node


def cast(reading: Reading, model: TrackedObject, name: str, call: CallSite) -> None:
    """Note a model's cast: half(), to(dtype), float(), or requires_grad_()."""
    root = model.root
    conditions = [condition for condition in reading.conditions if id(condition.test) not in root.made_under]
    if name == "bfloat16" or (name == "to" and any(value in _BF16 for value in call.values)):
        root.bf16_by = None if conditions else call.node
    elif name in ("half", *_WIDENS) or (name == "to" and any(isinstance(v, Dotted) for v in call.values)):
        root.bf16_by = None
    is_certain = all(is_fp16_test(condition.test) and not condition.is_else for condition in conditions)
    formats = [value for value in call.values if not _is_device(value)]
    makes_half = name == "half" or (name == "to" and any(map(is_half, formats)))
    if makes_half and is_certain:
        root.half_by = call.node
    elif name == "requires_grad_" or makes_half or (not is_certain and name in _WIDENS):
        root.has_open_weights = True
    elif name in _WIDENS or (name == "to" and any(isinstance(value, Dotted) for value in formats)):
        root.half_by = None
    elif name == "to" and _may_cast(call):
        root.has_open_weights = True


def _is_device(value: Value) -> bool:
    return isinstance(value, Constant) and value.value != "float16"


def _may_cast(call: CallSite) -> bool:
    """Return True if to() has an argument that may be a number format."""
    node = call.node
    arguments = (
        [*node.args, *(keyword.value for keyword in node.keywords)] if isinstance(node, ast.Call) else []
    )
    words = (ast.unparse(argument).lower() for argument in arguments)
    return any("type" in word or "precision" in word or word in ("args", "kwargs") for word in words)


def mark_open(iterated: ast.expr, evaluate: Callable[[ast.expr], Value]) -> None:
    """Note that a loop reaches a model's weights one by one: it may freeze or cast some."""
    for node in ast.walk(iterated):
        if not isinstance(node, ast.Attribute) or node.attr not in _IN_PARTS:
            continue
        owner = evaluate(node.value) if isinstance(node.value, (ast.Name, ast.Attribute)) else None
        if isinstance(owner, TrackedObject) and owner.kind is ObjectKind.MODEL:
            owner.root.has_open_weights = True


def bf16_weights(reading: Reading, model: TrackedObject) -> Snippet | None:
    """Return the call that made the weights of a model bf16; None if something may have changed them."""
    root = model.root
    if root.bf16_by is None or root.has_open_weights or reading.text.has(*_UPCASTS):
        return None
    return reading.text.snippet(root.bf16_by)


def half_weights(
    reading: Reading, objects: Iterable[Value], *, is_trainer: bool = False
) -> Said[object] | None:
    """Return what made the weights fp16 that an optimizer among these objects, or a Trainer, trains.

    Args:
        reading: the interpreter's records.
        objects: the arguments of prepare(), or the model of a Trainer.
        is_trainer: True for a Trainer, which makes its optimizer itself.
    """
    given = list(objects)
    tracked = [value for value in given if isinstance(value, TrackedObject)]
    models = [value for value in tracked if value.kind is ObjectKind.MODEL]
    optimizers = [value for value in tracked if value.kind is ObjectKind.OPTIMIZER]
    trained = [value.of for value in optimizers if value.of is not None]
    if not is_trainer and not optimizers and all(isinstance(value, TrackedObject) for value in given):
        return None  # it is not trained, or by an optimizer that is prepared on its own
    candidates = trained or models  # a teacher may be prepared too
    if len(candidates) != 1 or candidates[0].is_adapted or candidates[0].frozen_by is not None:
        return None
    root = candidates[0].root
    if root.half_by is None or root.has_open_weights or reading.text.has(*_UPCASTS):
        return None
    outside = [condition for condition in reading.conditions if condition.depth == 0]
    may_skip = outside or reading.root or root.made_under or root.has_escaped
    by = reading.text.snippet(root.half_by)
    is_sure = not may_skip and (is_trainer or len(trained) == len(optimizers) > 0)
    confidence = Confidence.CERTAIN if is_sure else Confidence.LIKELY
    return Said(value=None, text=by.text, place=by.place, confidence=confidence)


@lru_cache(maxsize=256)  # a script may call a function often
def yields(function: ast.AST) -> bool:
    """Return True if a function is a generator."""
    return any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in ast.walk(function))


def record_gathered(
    reading: Reading, function: LocalFunction, argument: ast.expr, evaluate: Callable[[ast.expr], Value]
) -> None:
    """Record that a model's state_dict() goes to a function that gathers what DeepSpeed has partitioned."""
    if isinstance(argument, ast.Name) and (assigned := reading.scope.assigned(argument.id)):
        argument = assigned[-1]
    called = argument.func if isinstance(argument, ast.Call) else None
    if not isinstance(called, ast.Attribute) or called.attr != "state_dict":
        return
    is_path = isinstance(called.value, (ast.Name, ast.Attribute))
    model = evaluate(called.value) if is_path else None
    if not isinstance(model, TrackedObject) or model.kind is not ObjectKind.MODEL:
        return
    # state_dict() of other models is recorded wherever it is called.
    if (model.is_adapted or reading.is_in_foreign_trainer) and _gathers(function):
        reading.record(Action.GATHER_STATE_DICT, argument, model)


def _gathers(function: LocalFunction, steps: int = 0) -> bool:
    """Return True if a function, or one of the script's that it calls, asks parameters for DeepSpeed's id."""
    nodes = list(ast.walk(function.node))
    if any(getattr(node, "attr", getattr(node, "value", None)) in ("ds_id", "ds_status") for node in nodes):
        return True
    names_used = {node.id for node in nodes if isinstance(node, ast.Name)}
    values = map(function.scope.look_up, sorted(names_used))
    called = [value for value in values if isinstance(value, LocalFunction)]
    return steps < 2 and any(_gathers(value, steps + 1) for value in called)
