"""How a script counts the steps of a learning rate's scheduler."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from zerofit.scripts.source.conditions import dotted

if TYPE_CHECKING:
    from zerofit.scripts.source.values import Scope

_COUNTS = re.compile(r"len|num_processes|world_size|steps_per|num_batches|ceil|epoch", re.IGNORECASE)
_MAX_NAMES = 50


def is_counted_without_ranks(total: ast.expr, scope: Scope) -> bool:
    """Return whether a number of steps comes from numbers and arguments alone, without data or ranks.

    Args:
        total: the expression.
        scope: where its names are looked up.
    """
    pending, done = [total], set[str]()
    while pending:
        node = pending.pop()
        if _COUNTS.search(ast.unparse(node)):
            return False
        if isinstance(node, ast.Constant):
            continue
        if isinstance(node, ast.BinOp):
            pending += [node.left, node.right]
            continue
        path = dotted(node, scope)
        if path is None or len(done) > _MAX_NAMES:
            return False
        if path in done:
            continue
        done.add(path)
        assigned = scope.assigned(path)
        if not assigned and isinstance(node, ast.Name):
            return False  # a parameter, whose value comes from elsewhere
        pending += assigned
    return True
