"""A rank's own part of something, such as `prompts[rank::world_size]`: ranks' parts differ in length."""

from __future__ import annotations

import ast
import re

from zerofit.script_reading.conditions import is_rank
from zerofit.script_reading.equal_parts import is_cut_to_multiple, is_equal_part, is_multiple
from zerofit.script_reading.values import Kind, Scope, Share, Thing, Value

_EVENS_OUT = re.compile(r"gather|reduce|broadcast|prepare|\bpad|_pad")
"""Calls that leave no rank with another number than the others."""
_SPLITS_BY_RANK = {"shard", "islice", "split_dataset_by_node"}
_UNEVEN_SPLITS = {"array_split"}
"""Calls whose result holds a part for each rank."""


def is_share(node: ast.expr, scope: Scope) -> bool:
    """Return whether an expression is a rank's own part of something, or is made from one."""
    pending: list[ast.AST] = [node]
    while pending:
        part = pending.pop()
        if _makes_share(part, scope):
            return True
        if isinstance(part, ast.Name) and isinstance(scope.look_up(part.id), Share):
            return True
        if not _evens_out(part):
            pending += ast.iter_child_nodes(part)
    return False


def own_or(value: Value, node: ast.expr, scope: Scope) -> Value:
    """Return what an expression stands for: a rank's own part, where it is no more than a loader of one."""
    is_open = value is None or (isinstance(value, Thing) and value.kind is Kind.LOADER)
    return Share() if is_open and is_share(node, scope) else value


def comes_in_turn(test: ast.expr, scope: Scope, *, is_else: bool) -> bool:
    """Return whether ranks pass a condition in turn: `number % world_size == rank`."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return False
    sides = (test.left, test.comparators[0])
    has_remainder = any(isinstance(side, ast.BinOp) and isinstance(side.op, ast.Mod) for side in sides)
    passes = isinstance(test.ops[0], ast.NotEq if is_else else ast.Eq)
    return has_remainder and passes and any(is_rank(side, scope) for side in sides)


def _makes_share(node: ast.AST, scope: Scope) -> bool:
    if isinstance(node, ast.Call):
        return _splits(node, scope)
    if not isinstance(node, ast.Subscript):
        return False
    if not isinstance(node.slice, ast.Slice):
        return is_rank(node.slice, scope) and _is_split_unevenly(node.value, scope)
    lower, upper, step = node.slice.lower, node.slice.upper, node.slice.step
    if lower is None or (upper is None and step is None):
        return False
    if step is not None:
        return is_rank(lower, scope) and not is_cut_to_multiple(node.value, step, scope)
    if upper is None or is_equal_part(lower, upper, scope):
        return False
    return _depends_on_rank(lower, scope) and _depends_on_rank(upper, scope)


def _evens_out(node: ast.AST) -> bool:
    """Return whether what is made has one length on all ranks, though parts of it do not: `own[:8]` too."""
    if isinstance(node, ast.Call):
        return _EVENS_OUT.search(_called(node)) is not None
    cut = node.slice if isinstance(node, ast.Subscript) else None
    return isinstance(cut, ast.Slice) and cut.lower is None and isinstance(cut.upper, ast.Constant)


def _splits(call: ast.Call, scope: Scope) -> bool:
    name = _called(call)
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    if name == "split_between_processes":
        pads = next((keyword.value for keyword in call.keywords if keyword.arg == "apply_padding"), None)
        return pads is None or (isinstance(pads, ast.Constant) and pads.value is False)
    if name == "range":
        is_own = len(call.args) == 3 and is_rank(call.args[0], scope)
        return is_own and not is_multiple(call.args[1], call.args[2], scope)
    return name in _SPLITS_BY_RANK and any(is_rank(value, scope) for value in values)


def _is_split_unevenly(node: ast.expr, scope: Scope) -> bool:
    assigned = scope.assigned(node.id) if isinstance(node, ast.Name) else []
    return any(isinstance(made, ast.Call) and _called(made) in _UNEVEN_SPLITS for made in (node, *assigned))


def _depends_on_rank(node: ast.expr, scope: Scope) -> bool:
    """Return whether an expression, or what is assigned to a name in it, names a rank."""
    names = [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
    assigned = [expression for name in names for expression in scope.assigned(name)]
    return any(
        isinstance(part, ast.expr) and is_rank(part, scope)
        for expression in (node, *assigned)
        for part in ast.walk(expression)
    )


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
