"""Values of expressions of a script, computed where it has stopped; none of its functions is called."""

from __future__ import annotations

import ast
import math
import operator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_BINARY: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARED: dict[type[ast.cmpop], Any] = {
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_PURE = (len, int, float, max, min, round, abs, range, math.ceil, math.floor)
"""Functions that are called to evaluate an expression: none changes anything."""


def value_of(node: ast.expr, scope: Mapping[str, Any]) -> Any:
    """Return the value of an expression of names, numbers and arithmetic; None if unknown."""
    try:
        return _evaluated(node, scope)
    except Exception:  # arbitrary objects of the script
        return None


def _evaluated(node: ast.expr, scope: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return scope[node.id]
        case ast.Attribute():
            return getattr(_evaluated(node.value, scope), node.attr)
        case ast.List() | ast.Tuple():
            return [_evaluated(element, scope) for element in node.elts]
        case ast.Subscript():
            return _evaluated(node.value, scope)[_evaluated(node.slice, scope)]
        case ast.BinOp():
            return _BINARY[type(node.op)](_evaluated(node.left, scope), _evaluated(node.right, scope))
        case ast.UnaryOp(op=ast.USub()):
            return -_evaluated(node.operand, scope)
        case ast.UnaryOp(op=ast.Not()):
            return not _evaluated(node.operand, scope)
        case ast.Compare(ops=[comparison], comparators=[other]):
            return _COMPARED[type(comparison)](_evaluated(node.left, scope), _evaluated(other, scope))
        case ast.Call(keywords=[]):
            function = _evaluated(node.func, scope)
            if not any(function is pure for pure in _PURE):
                raise ValueError(ast.unparse(node))
            return function(*(_evaluated(word, scope) for word in node.args))
    raise ValueError(ast.unparse(node))
