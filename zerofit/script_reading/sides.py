"""What is known to hold where a call is made, and which calls no run of a script makes both."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zerofit.script_facts import Plain
    from zerofit.script_reading.reading import Condition

Fact = tuple[str, "Plain"]
"""An expression as written, and its value: ("args.do_train", True), or ("mode ==", "eval")."""


def facts_of(conditions: Iterable[Condition]) -> frozenset[Fact]:
    """Return what holds where all these conditions do."""
    found: set[Fact] = set()
    pending: list[tuple[ast.expr, bool]] = [
        (condition.test, not condition.is_else) for condition in conditions
    ]
    while pending:
        test, holds = pending.pop()
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            pending.append((test.operand, not holds))
        elif isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And if holds else ast.Or):
            pending += [(value, holds) for value in test.values]
        else:
            found.add((ast.unparse(test), holds))
            found |= _equality(test) if holds else set()
    return frozenset(found)


def exclude(first: Iterable[Condition], second: Iterable[Condition]) -> bool:
    """Return whether conditions can't hold together: sides of one test, or of one that says the opposite."""
    known = dict(facts_of(first))
    return any(known.get(text, value) != value for text, value in facts_of(second))


def _equality(test: ast.expr) -> set[Fact]:
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq):
        return set()
    right = test.comparators[0]
    is_plain = isinstance(right, ast.Constant) and isinstance(right.value, (str, int))
    return {(f"{ast.unparse(test.left)} ==", right.value)} if is_plain else set()  # type: ignore[attr-defined]
