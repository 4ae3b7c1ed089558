"""Conditions of a script: on ranks, on DeepSpeed, and on every n-th step."""

from __future__ import annotations

import ast
import operator
import re
from typing import TYPE_CHECKING, Any

from zerofit.scripts.source.names import RANK_CALLS
from zerofit.scripts.source.values import (
    Constant,
    Dotted,
    ObjectKind,
    Rank,
    RankTest,
    Scope,
    TrackedObject,
    Value,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from zerofit.scripts.facts import Plain
    from zerofit.scripts.source.reading import Condition

_MAIN = {
    "is_main_process", "is_local_main_process", "is_world_process_zero", "is_local_process_zero",
    "is_rank_0", "is_rank_zero", "is_rank0", "is_global_zero", "is_master", "is_main",
}  # fmt: skip
_MAIN_GUARDS = ("__name__ == '__main__'", "'__main__' == __name__")
_MAIN_FIRST = {
    "main_process_first", "local_main_process_first", "torch_distributed_zero_first", "rank_zero_first",
    "main_local_process_first", "zero_first", "global_main_process_first",
}  # fmt: skip
_LAST = {"is_last_process"}
_RANKS = {"rank", "local_rank", "global_rank", "process_index", "local_process_index", "RANK", "LOCAL_RANK"}
_SURE_RANKS = {"global_rank", "process_index", "local_process_index"}
_FRAMEWORK = re.compile(r"deepspeed|\bzero|zero_?stage|\bds_|fsdp|megatron|\btpu|xla", re.IGNORECASE)
_OPERATIONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda rank, ranks: rank in ranks,
    ast.NotIn: lambda rank, ranks: rank not in ranks,
}
_MOST_RANKS = 1024
"""Maximum world size that a condition is tested with."""
_ALONE = re.compile(r"is_initialized|is_available|world_size|num_processes|distributed|ddp", re.IGNORECASE)


def rank_test(test: ast.expr, scope: Scope) -> RankTest | None:
    """Return which ranks pass a condition; None if it does not depend on the rank, or not certainly."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        if is_number_of_rank(test.operand, scope):
            return RankTest(is_main=True)
        inner = rank_test(test.operand, scope)
        # "not (main and x)" holds on the main rank too.
        is_sure = inner is not None and not isinstance(test.operand, ast.BoolOp)
        return RankTest(is_main=not inner.is_main) if inner and is_sure else None
    if isinstance(test, ast.BoolOp):
        inner_tests = [rank_test(value, scope) for value in test.values]
        found = [inner for inner in inner_tests if inner]
        if isinstance(test.op, ast.And):
            return found[0] if found else None
        rest = [value for value, inner in zip(test.values, inner_tests, strict=True) if inner is None]
        is_sure = bool(found) and all(_ALONE.search(ast.unparse(value)) for value in rest)
        return found[0] if is_sure else None
    if isinstance(test, ast.Compare):
        return _comparison(test, scope)
    if is_number_of_rank(test, scope):
        return RankTest(is_main=False)
    if isinstance(test, ast.Call):
        return rank_test(test.func, scope) if not test.args and not test.keywords else None
    if isinstance(test, ast.Name):
        value = scope.look_up(test.id)
        if isinstance(value, RankTest):
            return value
    name = test.attr if isinstance(test, ast.Attribute) else test.id if isinstance(test, ast.Name) else ""
    if name in _MAIN:
        return RankTest(is_main=True)
    return RankTest(is_main=False) if name in _LAST else None


def is_main_guard(test: ast.expr) -> bool:
    """Return True for `__name__ == "__main__"`, which holds in each run of a script."""
    return ast.unparse(test) in _MAIN_GUARDS


def is_main_first(context: ast.expr) -> bool:
    """Return True for `with accelerator.main_process_first():` and its kind: the other ranks wait for one."""
    return isinstance(context, ast.Call) and _last_name(context.func) in _MAIN_FIRST


def lacks_section(test: ast.expr, scope: Scope, *, is_else: bool, section: str = "scheduler") -> bool:
    """Return True if a condition holds when DeepSpeed's configuration lacks a section."""
    if isinstance(test, ast.Name):
        assigned = scope.assigned(test.id)
        return len(assigned) == 1 and lacks_section(assigned[0], scope, is_else=is_else, section=section)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return lacks_section(test.operand, scope, is_else=not is_else, section=section)
    if isinstance(test, ast.BoolOp):
        found = [lacks_section(value, scope, is_else=is_else, section=section) for value in test.values]
        return any(found)
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.left, ast.Constant):
        return False
    wanted = ast.In if is_else else ast.NotIn
    is_of_config = "deepspeed" in ast.unparse(test.comparators[0]).lower()
    return test.left.value == section and isinstance(test.ops[0], wanted) and is_of_config


def _comparison(test: ast.Compare, scope: Scope) -> RankTest | None:
    holds = _OPERATIONS.get(type(test.ops[0]))
    if len(test.ops) != 1 or holds is None or not is_rank(test.left, scope):
        return None
    try:
        value = ast.literal_eval(test.comparators[0])
        main, *others = [holds(rank, value) for rank in range(_MOST_RANKS)]
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return None
    return RankTest(is_main=main) if main != any(others) else None


def is_number_of_rank(node: ast.expr, scope: Scope) -> bool:
    """Return True if an expression is certainly a rank number, so that only 0 is false.

    A bare name `rank` may be LoRA's, and environment variables are strings.
    """
    if isinstance(node, ast.Name):
        return isinstance(scope.look_up(node.id), Rank)
    if isinstance(node, ast.Attribute):
        return node.attr in _SURE_RANKS
    return isinstance(node, ast.Call) and is_rank(node, scope)


def is_rank(node: ast.expr, scope: Scope) -> bool:
    """Return True if an expression is a rank number, by its value or its name."""
    if isinstance(node, ast.Call):
        value = dotted(node.func, scope)
        last = value.rpartition(".")[2] if value else ""
        if value in RANK_CALLS or last in ("get_rank", "get_global_rank", "get_local_rank"):
            return True
        return last == "int" and len(node.args) == 1 and is_rank(node.args[0], scope)
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value in _RANKS
    if isinstance(node, ast.Name):
        return isinstance(scope.look_up(node.id), Rank) or node.id in _RANKS
    return isinstance(node, ast.Attribute) and node.attr in _RANKS


def dotted(node: ast.expr, scope: Scope) -> str | None:
    """Return the dotted name of an expression of names and attributes, imports resolved."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    value = scope.look_up(node.id)
    first = value.name if isinstance(value, Dotted) else node.id
    return ".".join((first, *reversed(parts)))


def rank_value(node: ast.expr, scope: Scope) -> Value:
    """Return the value of an expression on ranks; None if it is not one."""
    if is_rank(node, scope):
        return Rank()
    return rank_test(node, scope) if isinstance(node, (ast.Compare, ast.BoolOp, ast.UnaryOp)) else None


def names_framework(test: ast.expr) -> bool:
    """Return True if a condition is about DeepSpeed, its stage, or another training framework."""
    return bool(_FRAMEWORK.search(ast.unparse(test)))


def has_remainder(test: ast.expr, scope: Scope) -> bool:
    """Return True if a condition only holds every n-th step: `step % 4 == 0`, even with `or last`."""
    return any(
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and not _is_one(node.right, scope)
        for node in ast.walk(test)
    )


def period_of(test: ast.expr, scope: Scope) -> int | None:
    """Return the 4 of a condition `step % 4 == 0`; None if the source does not show it."""
    for node in ast.walk(test):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            value = scope.look_up(node.right.id) if isinstance(node.right, ast.Name) else None
            number = value.value if isinstance(value, Constant) else getattr(node.right, "value", None)
            if type(number) is int:
                return number
    return None


def period_argument_of(test: ast.expr, scope: Scope) -> str | None:
    """Return the "every" of a condition `step % args.every == 0`, if args are what a parser returns."""
    for node in ast.walk(test):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            read = node.right
            if not (isinstance(read, ast.Attribute) and isinstance(read.value, ast.Name)):
                return None
            owner = scope.look_up(read.value.id)
            if not isinstance(owner, TrackedObject) or owner.kind is not ObjectKind.NAMESPACE:
                return None
            return None if owner.options or read.attr in owner.attributes else read.attr
    return None


def is_fp16_test(test: ast.expr) -> bool:
    """Return True for a condition that holds under fp16 mixed precision: `args.mixed_precision == "fp16"`."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        right = test.comparators[0]
        is_fp16 = isinstance(right, ast.Constant) and right.value == "fp16"
        return is_fp16 and _last_name(test.left) == "mixed_precision"
    return _last_name(test) == "fp16"


def is_about_precision(test: ast.expr) -> bool:
    """Return True if a condition is about the mixed precision of the run."""
    names = {_last_name(node) for node in ast.walk(test) if isinstance(node, (ast.Name, ast.Attribute))}
    return bool(names & {"mixed_precision", "fp16", "bf16"})


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_one(node: ast.expr, scope: Scope) -> bool:
    value = scope.look_up(node.id) if isinstance(node, ast.Name) else None
    return value == Constant(1) or (isinstance(node, ast.Constant) and node.value == 1)


Fact = tuple[str, "Plain"]
"""An expression as written, and its value: ("args.do_train", True), or ("mode ==", "eval")."""


def facts_of(conditions: Iterable[Condition]) -> frozenset[Fact]:
    """Return the facts that hold if all these conditions do."""
    tests = ((condition.test, condition.is_else) for condition in conditions)
    return frozenset().union(*(facts_of_test(test, is_else=is_else) for test, is_else in tests))


def facts_of_test(test: ast.expr, *, is_else: bool) -> frozenset[Fact]:
    """Return the facts that hold if a test does, or if it does not."""
    found: set[Fact] = set()
    pending: list[tuple[ast.expr, bool]] = [(test, not is_else)]
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
    """Return True if conditions exclude each other: two sides of one test, or of its negation."""
    known = dict(facts_of(first))
    return any(known.get(text, value) != value for text, value in facts_of(second))


def _equality(test: ast.expr) -> set[Fact]:
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq):
        return set()
    right = test.comparators[0]
    is_plain = isinstance(right, ast.Constant) and isinstance(right.value, (str, int))
    return {(f"{ast.unparse(test.left)} ==", right.value)} if is_plain else set()  # type: ignore[attr-defined]
