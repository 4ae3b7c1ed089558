"""Expressions of a script: what they stand for, and the calls in them in the order in which they run."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from zerofit.scripts.facts import Action, ModelState
from zerofit.scripts.source import calls, conditions
from zerofit.scripts.source.names import is_model_class
from zerofit.scripts.source.reading import Condition, wrapped
from zerofit.scripts.source.shares import is_share
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
    join,
)

if TYPE_CHECKING:
    from zerofit.scripts.source.reading import Reading

_ACCUMULATES = ("accumulate", "no_sync")


def evaluate(reading: Reading, node: ast.expr) -> Value:
    """Return what an expression stands for, and note the calls in it."""
    match node:
        case ast.Constant():
            is_plain = isinstance(node.value, (str, int, float, bool, type(None)))
            return Constant(node.value) if is_plain else None  # type: ignore[arg-type]
        case ast.Name():
            return _name(reading, node)
        case ast.Attribute():
            return _attribute(reading, node)
        case ast.Call():
            return calls.evaluate_call(reading, node)
        case ast.Tuple() | ast.List():
            return _several(reading, node)
        case ast.Dict():
            return _mapping(reading, node)
        case ast.IfExp():
            return _choice(reading, node)
        case ast.Lambda():
            return LocalFunction(node, reading.scope)
        case ast.NamedExpr():
            value = evaluate(reading, node.value)
            reading.scope.names[node.target.id] = value
            return value
        case ast.Await() | ast.Starred():
            return evaluate(reading, node.value)
        case ast.Subscript():
            return _item(reading, node)
        case ast.UnaryOp():
            return _negative(reading, node)
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            _comprehension(reading, node)
            return None
    _children(reading, node)
    return None


def _children(reading: Reading, node: ast.expr) -> None:
    pending: list[ast.expr] = []
    # A sum of a thousand strings is a thousand levels deep on its left side.
    while isinstance(node, ast.BinOp):
        pending.append(node.right)
        node = node.left
    if pending:
        for part in (node, *reversed(pending)):
            evaluate(reading, part)
        return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            evaluate(reading, child)


def _name(reading: Reading, node: ast.Name) -> Value:
    value = reading.scope.look_up(node.id)
    return _foreign_accelerator(reading, node) if value is None and node.id == "accelerator" else value


def _foreign_accelerator(reading: Reading, node: ast.expr) -> Thing:
    reading.has_foreign_accelerator = True
    return Thing(kind=Kind.ACCELERATOR, node=node)


def _attribute(reading: Reading, node: ast.Attribute) -> Value:
    owner = evaluate(reading, node.value)
    if node.attr in _ACCUMULATES:
        # Called or not: some scripts keep the method, and call it in another place.
        reading.see(Action.ACCUMULATE, node)
    if isinstance(owner, Dotted):
        return Dotted(f"{owner.name}.{node.attr}")
    if isinstance(owner, LocalClass):
        method = owner.method(node.attr)
        if method is not None:
            return LocalFunction(method, owner.scope)
        base = next((base for base in owner.foreign_bases() if is_model_class(base)), None)
        return Dotted(f"{base}.{node.attr}") if base else None
    if isinstance(owner, Thing):
        return _attribute_of_thing(reading, owner, node)
    return _foreign_accelerator(reading, node) if owner is None and node.attr == "accelerator" else None


def _attribute_of_thing(reading: Reading, owner: Thing, node: ast.Attribute) -> Value:
    if node.attr in owner.attributes:
        return owner.attributes[node.attr]
    if owner.kind is Kind.TRAINER:
        if node.attr == "accelerator":
            return Thing(kind=Kind.ACCELERATOR, node=node)
        if node.attr in ("model", "model_wrapped", "deepspeed"):
            state = ModelState.IN_ENGINE if node.attr == "model" else ModelState.ENGINE
            return (
                wrapped(owner.of, node, state) if owner.of else Thing(kind=Kind.MODEL, node=node, state=state)
            )
    if owner.kind is Kind.MODEL and node.attr == "module" and owner.state is ModelState.ENGINE:
        return wrapped(owner, node, ModelState.IN_ENGINE)
    if owner.kind is Kind.TOKENS and node.attr == "sequences":
        return owner
    method = owner.cls.method(node.attr) if owner.cls else None
    if method is not None and owner.cls and owner.kind is not Kind.MODEL:
        is_property = any(isinstance(item, ast.Name) for item in method.decorator_list)
        return None if is_property else LocalFunction(method, owner.cls.scope, owner)
    if owner.kind is Kind.OBJECT and node.attr == "accelerator":
        return _foreign_accelerator(reading, node)
    return Method(owner, node.attr)


def _several(reading: Reading, node: ast.Tuple | ast.List) -> Value:
    values: list[Value] = []
    for item in node.elts:
        value = evaluate(reading, item)
        if isinstance(item, ast.Starred):
            if not isinstance(value, Several):
                return None
            values += value.values
        else:
            values.append(value)
    return Several(tuple(values))


def _mapping(reading: Reading, node: ast.Dict) -> Value:
    values: list[tuple[str, Value]] = []
    for key, item in zip(node.keys, node.values, strict=True):
        if key is not None:
            evaluate(reading, key)
        value = evaluate(reading, item)
        if key is None and isinstance(value, Mapping):
            values += value.values
        elif isinstance(key, ast.Constant):
            values.append((str(key.value), value))
    return Mapping(tuple(values))


def _choice(reading: Reading, node: ast.IfExp) -> Value:
    evaluate(reading, node.test)
    found: list[Value] = []
    for arm, is_else in ((node.body, False), (node.orelse, True)):
        rank = None if is_else else conditions.rank_test(node.test, reading.scope)
        reading.conditions.append(
            Condition(
                test=node.test,
                is_else=is_else,
                rank=rank,
                is_about_framework=conditions.asks_for_framework(node.test),
                has_remainder=False,
                is_in_turn=False,
                depth=len(reading.loops),
            )
        )
        found.append(evaluate(reading, arm))
        reading.conditions.pop()
    if isinstance(found[0], Thing) or isinstance(found[1], Thing):
        return join(found[0], found[1])
    return found[0] if found[0] == found[1] else None


def _item(reading: Reading, node: ast.Subscript) -> Value:
    value = evaluate(reading, node.value)
    evaluate(reading, node.slice)
    if isinstance(value, Thing) and value.kind is Kind.TOKENS:
        return value if _leaves_length_open(node.slice) else None
    if (
        isinstance(value, Several)
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.slice.value, int)
    ):
        index = node.slice.value
        return value.values[index] if index < len(value.values) else None
    if isinstance(value, Mapping) and isinstance(node.slice, ast.Constant):
        return dict(value.values).get(str(node.slice.value))
    return None


def _leaves_length_open(part: ast.expr) -> bool:
    """Return whether a part of generated tokens is as long as they are: a row, or `[:, prompt_length:]`."""
    last = part.elts[-1] if isinstance(part, ast.Tuple) and part.elts else None
    return last is None or (isinstance(last, ast.Slice) and last.upper is None)


def _negative(reading: Reading, node: ast.UnaryOp) -> Value:
    value = evaluate(reading, node.operand)
    if (
        isinstance(node.op, ast.USub)
        and isinstance(value, Constant)
        and isinstance(value.value, (int, float))
    ):
        return Constant(-value.value)
    return None


def _comprehension(
    reading: Reading, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
) -> None:
    outer = reading.scope.names
    reading.scope.names = dict(outer)
    shares = [generator.iter for generator in node.generators if is_share(generator.iter, reading.scope)]
    for generator in node.generators:
        calls.hand_on((evaluate(reading, generator.iter),))
        for name in ast.walk(generator.target):
            if isinstance(name, ast.Name):
                reading.scope.names[name.id] = None
        for test in generator.ifs:
            evaluate(reading, test)
    parts = (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,)
    reading.shares += shares
    for part in parts:
        evaluate(reading, part)
    del reading.shares[len(reading.shares) - len(shares) :]
    reading.scope.names = outer
