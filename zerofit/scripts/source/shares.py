"""A rank's own part of something, such as `prompts[rank::world_size]`: ranks' parts differ in length."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from zerofit.scripts.source.conditions import is_rank
from zerofit.scripts.source.values import Kind, Scope, Share, Thing, Value

if TYPE_CHECKING:
    from zerofit.scripts.source.values import Scope

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


def is_equal_part(lower: ast.expr, upper: ast.expr, scope: Scope) -> bool:
    """Return whether a slice from lower to upper has one length on all ranks: `[rank * n : (rank + 1) * n]`.

    The length must be rounded down. Rounded up, as by `(len(data) + world - 1) // world`, it leaves the last
    rank with fewer.
    """
    start, end = _made(lower, scope), _made(upper, scope)
    for rank, length in _factors(start):
        if not is_rank(rank, scope) or not _is_rounded_down(_made(length, scope)):
            continue
        comes_to_next = any(_is_next(one, rank) and _is_same(two, length) for one, two in _factors(end))
        if comes_to_next or any(_is_same(one, lower, start) for one in _beside(end, length)):
            return True
    return False


def is_multiple(end: ast.expr, step: ast.expr, scope: Scope) -> bool:
    """Return whether a range to `end` in steps of `step` is as long from each start below the step."""
    return any(_is_same(factor, step) for factor, _ in _factors(_made(end, scope)))


def is_cut_to_multiple(rows: ast.expr, step: ast.expr, scope: Scope) -> bool:
    """Return whether rows are cut to a multiple of the ranks: `rows = rows[: len(rows) // world * world]`."""
    assigned = scope.assigned(rows.id) if isinstance(rows, ast.Name) else []
    cuts = [made.slice for made in (rows, *assigned) if isinstance(made, ast.Subscript)]
    return any(
        isinstance(cut, ast.Slice) and cut.upper is not None and is_multiple(cut.upper, step, scope)
        for cut in cuts
    )


def _made(node: ast.expr, scope: Scope) -> ast.expr:
    """Return the expression that a name stands for, where it is assigned once."""
    assigned = scope.assigned(node.id) if isinstance(node, ast.Name) else []
    return assigned[0] if len(assigned) == 1 else node


def _sides(node: ast.expr, operation: type[ast.operator]) -> list[tuple[ast.expr, ast.expr]]:
    """Return the two sides of an operation, in both orders; nothing for another operation."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, operation):
        return []
    return [(node.left, node.right), (node.right, node.left)]


def _factors(node: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    return _sides(node, ast.Mult)


def _summands(node: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    return _sides(node, ast.Add)


def _beside(node: ast.expr, summand: ast.expr) -> list[ast.expr]:
    """Return what a sum adds to one of its two summands."""
    return [one for one, two in _summands(node) if _is_same(two, summand)]


def _is_next(node: ast.expr, rank: ast.expr) -> bool:
    return any(
        _is_same(part, rank) and isinstance(one, ast.Constant) and one.value == 1
        for part, one in _summands(node)
    )


def _is_rounded_down(node: ast.expr) -> bool:
    is_floor = isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv)
    return is_floor and not isinstance(node.left, (ast.BinOp, ast.UnaryOp))  # type: ignore[attr-defined]


def _is_same(node: ast.expr, *others: ast.expr) -> bool:
    return ast.unparse(node) in {ast.unparse(other) for other in others}
