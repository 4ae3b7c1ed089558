"""Per-rank shares of data, such as `prompts[rank::world_size]`, whose lengths differ between ranks."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from zerofit.scripts.source.conditions import is_rank
from zerofit.scripts.source.names import called_name
from zerofit.scripts.source.values import ObjectKind, Share, TrackedObject, Value

if TYPE_CHECKING:
    from zerofit.scripts.source.values import Scope

_EQUALIZES_LENGTHS = re.compile(r"gather|reduce|broadcast|prepare|\bpad|_pad")
"""Calls after which all ranks have the same number of items."""
_OF_DATA = (ObjectKind.LOADER, ObjectKind.ITERATOR)
_SPLITS_BY_RANK = {"shard", "islice", "split_dataset_by_node"}


def is_share(node: ast.expr, scope: Scope) -> bool:
    """Return True if an expression is a rank's share of something, or made from one.

    A contiguous slice, `rows[rank * size : (rank + 1) * size]`, is not counted: it mostly has the same length
    on all ranks.
    """
    pending: list[ast.AST] = [node]
    while pending:
        part = pending.pop()
        if _makes_share(part, scope):
            return True
        if isinstance(part, ast.Name) and isinstance(scope.look_up(part.id), Share):
            return True
        if not _equalizes_lengths(part):
            pending += ast.iter_child_nodes(part)
    return False


def share_or(value: Value, node: ast.expr, scope: Scope) -> Value:
    """Return Share() for a rank's share whose value is unknown or a loader; otherwise the value."""
    is_open = value is None or (isinstance(value, TrackedObject) and value.kind in _OF_DATA)
    return Share() if is_open and is_share(node, scope) else value


def is_round_robin(test: ast.expr, scope: Scope, *, is_else: bool) -> bool:
    """Return True if a condition assigns items to ranks round-robin: `number % world_size == rank`."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return False
    sides = (test.left, test.comparators[0])
    has_remainder = any(isinstance(side, ast.BinOp) and isinstance(side.op, ast.Mod) for side in sides)
    passes = isinstance(test.ops[0], ast.NotEq if is_else else ast.Eq)
    return has_remainder and passes and any(is_rank(side, scope) for side in sides)


def _makes_share(node: ast.AST, scope: Scope) -> bool:
    if isinstance(node, ast.Call):
        return _splits(node, scope)
    cut = node.slice if isinstance(node, ast.Subscript) else None
    if not isinstance(cut, ast.Slice) or cut.lower is None or cut.step is None:
        return False
    return is_rank(cut.lower, scope) and not _is_cut_to_multiple(node.value, cut.step, scope)  # type: ignore[attr-defined]


def _splits(call: ast.Call, scope: Scope) -> bool:
    name = called_name(call)
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    if name == "split_between_processes":
        pads = next((keyword.value for keyword in call.keywords if keyword.arg == "apply_padding"), None)
        return pads is None or (isinstance(pads, ast.Constant) and pads.value is False)
    if name == "range":
        is_own = len(call.args) == 3 and is_rank(call.args[0], scope)
        return is_own and not _is_multiple(call.args[1], call.args[2])
    return name in _SPLITS_BY_RANK and any(is_rank(value, scope) for value in values)


def _equalizes_lengths(node: ast.AST) -> bool:
    """Return True if the result has one length on all ranks although parts of it may not: also `own[:8]`."""
    if isinstance(node, ast.Call):
        return _EQUALIZES_LENGTHS.search(called_name(node)) is not None
    cut = node.slice if isinstance(node, ast.Subscript) else None
    return isinstance(cut, ast.Slice) and cut.lower is None and isinstance(cut.upper, ast.Constant)


def _is_multiple(end: ast.expr, step: ast.expr) -> bool:
    """Return True if a range to `end` in steps of `step` has one length from any start below the step."""
    sides = (end.left, end.right) if isinstance(end, ast.BinOp) and isinstance(end.op, ast.Mult) else ()
    return any(ast.unparse(side) == ast.unparse(step) for side in sides)


def _is_cut_to_multiple(rows: ast.expr, step: ast.expr, scope: Scope) -> bool:
    """Return True if rows are cut to a multiple of the ranks: `rows = rows[: len(rows) // world * world]`."""
    assigned = scope.assigned(rows.id) if isinstance(rows, ast.Name) else []
    cuts = [made.slice for made in (rows, *assigned) if isinstance(made, ast.Subscript)]
    return any(
        isinstance(cut, ast.Slice) and cut.upper is not None and _is_multiple(cut.upper, step) for cut in cuts
    )
