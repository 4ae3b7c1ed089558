"""Parts that are as long on every rank by how they are counted: `n = len(data) // world` rows for each."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from zerofit.script_reading.conditions import is_rank

if TYPE_CHECKING:
    from zerofit.script_reading.values import Scope


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
