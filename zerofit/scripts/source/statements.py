"""Statements of a script in the order in which they run: branches, loops, and calls of its own functions."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from zerofit.scripts.facts import ModelSource
from zerofit.scripts.source import calls, conditions
from zerofit.scripts.source.expressions import evaluate
from zerofit.scripts.source.names import GATHERED, ZERO_INIT, is_trainer
from zerofit.scripts.source.reading import Condition, Within
from zerofit.scripts.source.shares import comes_in_turn, own_or
from zerofit.scripts.source.values import (
    Dotted,
    Kind,
    LocalClass,
    LocalFunction,
    Method,
    RankTest,
    Scope,
    Several,
    Share,
    Thing,
    join,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerofit.scripts.source.reading import Reading
    from zerofit.scripts.source.values import Value

MAX_CALL_DEPTH = 12
"""Functions of the script within each other. ASSUMPTION: training scripts reach the loop in half of it."""
MAX_NODES = 300_000
"""Statements that are read, functions counted at each call. ASSUMPTION: real scripts stay far below."""
_WITHOUT_GRADIENTS = {
    "no_grad": (Within.NO_GRADIENTS,),
    "inference_mode": (Within.NO_GRADIENTS, Within.INFERENCE_MODE),
}
_DECIDES_ABOUT_ZERO = re.compile(r"zero|deepspeed|ContextManagers", re.IGNORECASE)
"""Such as accelerate's zero3_init_context_manager(), and what scripts of diffusers make of it."""
_ON_MAIN = {"on_main_process", "on_local_main_process", "on_process", "on_local_process"}
_EXITS = {"exit", "quit", "sys.exit", "os._exit"}


def read_block(reading: Reading, statements: Sequence[ast.stmt]) -> bool:
    """Read statements; return whether what stands behind them is never reached."""
    return any(_read_statement(reading, statement) for statement in statements)


def _read_statement(reading: Reading, node: ast.stmt) -> bool:
    reading.num_nodes += 1
    match node:
        case ast.If():
            return _read_if(reading, node)
        case ast.For() | ast.AsyncFor() | ast.While():
            _read_loop(reading, node)
        case ast.With() | ast.AsyncWith():
            return _read_with(reading, node)
        case ast.Try() | ast.TryStar():
            return _read_try(reading, node)
        case ast.Match():
            evaluate(reading, node.subject)
            tests = [_test_of(case, node.subject) for case in node.cases]
            _read_arms(reading, [case.body for case in node.cases], tests)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            bind(reading, node.name, LocalFunction(node, reading.scope))
        case ast.ClassDef():
            bases = tuple(evaluate(reading, base) for base in node.bases)
            bind(reading, node.name, LocalClass(node, reading.scope, bases))
        case ast.Import() | ast.ImportFrom():
            _read_import(reading, node)
        case ast.Assign():
            value = evaluate(reading, node.value)
            for target in node.targets:
                assign(reading, target, value, node.value)
        case ast.AnnAssign() if node.value is not None:
            assign(reading, node.target, evaluate(reading, node.value), node.value)
        case ast.AugAssign():
            evaluate(reading, node.value)
            assign(reading, node.target, None, node.value)
        case ast.Return():
            value = own_or(evaluate(reading, node.value), node.value, reading.scope) if node.value else None
            returned = reading.scope.names.get("return")
            reading.scope.names["return"] = (
                value if "return" not in reading.scope.names else join(returned, value)
            )
            return True
        case ast.Raise() | ast.Continue() | ast.Break():
            return True
        case ast.Expr():
            evaluate(reading, node.value)
            called = node.value.func if isinstance(node.value, ast.Call) else None
            return called is not None and conditions.dotted(called, reading.scope) in _EXITS
        case ast.Assert():
            evaluate(reading, node.test)
    return False


def _condition(reading: Reading, test: ast.expr, *, is_else: bool) -> Condition:
    rank = conditions.rank_test(test, reading.scope)
    if rank is not None and is_else:
        # Behind "main and x" the main rank comes too, where x does not hold.
        has_more = isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And)
        rank = None if has_more else RankTest(is_main=not rank.is_main)
    return Condition(
        test=test,
        is_else=is_else,
        rank=rank,
        is_about_framework=conditions.asks_for_framework(test),
        has_remainder=conditions.has_remainder(test, reading.scope),
        is_in_turn=bool(reading.loops) and comes_in_turn(test, reading.scope, is_else=is_else),
        depth=len(reading.loops),
    )


def _read_if(reading: Reading, node: ast.If) -> bool:
    evaluate(reading, node.test)
    before = dict(reading.scope.names)
    num = len(reading.conditions)
    reading.conditions.append(_condition(reading, node.test, is_else=False))
    ends = read_block(reading, node.body)
    of_body = reading.conditions[num:]
    del reading.conditions[num:]
    after_body, reading.scope.names = reading.scope.names, before
    reading.conditions.append(_condition(reading, node.test, is_else=True))
    ends_else = read_block(reading, node.orelse)
    of_else = reading.conditions[num:]
    del reading.conditions[num:]
    if "return" in after_body:
        reading.scope.names.setdefault("return", after_body["return"])
    if ends and not ends_else:
        # All that follows in this block is the other side: "if not is_main: return". What an early exit
        # in there leaves stays too: "elif only_predict: return".
        reading.conditions += of_else
    elif ends_else and not ends:
        reading.scope.names = after_body
        reading.conditions += of_body
    elif not ends:
        _merge(reading, after_body)
    return ends and ends_else


def _merge(reading: Reading, other: dict[str, Value]) -> None:
    names = reading.scope.names
    for name, value in other.items():
        names[name] = join(value, names[name]) if name in names else value


def _test_of(case: ast.match_case, subject: ast.expr) -> ast.expr:
    """Return what an arm of `match` asks, as `if` would write it; where it is no value, its place."""
    test: ast.expr = ast.Constant(f"case at line {case.pattern.lineno}")
    if isinstance(case.pattern, ast.MatchValue) and case.guard is None:
        test = ast.Compare(subject, [ast.Eq()], [case.pattern.value])
    return ast.copy_location(test, subject)


def _read_arms(reading: Reading, bodies: list[list[ast.stmt]], tests: Sequence[ast.expr] = ()) -> None:
    before = dict(reading.scope.names)
    for number, body in enumerate(bodies):
        after, reading.scope.names = reading.scope.names, dict(before)
        num = len(reading.conditions)
        for place, test in enumerate(tests[: number + 1]):
            reading.conditions.append(_condition(reading, test, is_else=place < number))
        ends = read_block(reading, body)
        del reading.conditions[num:]
        if ends:
            reading.scope.names = after
        else:
            _merge(reading, after)


def _read_loop(reading: Reading, node: ast.For | ast.AsyncFor | ast.While) -> None:
    over = node.test if isinstance(node, ast.While) else node.iter
    value = None if isinstance(node, ast.While) else evaluate(reading, over)
    is_share = isinstance(own_or(value, over, reading.scope), Share) and not _ends_early(node)
    shares = [over] if is_share else []
    if not isinstance(node, ast.While):
        calls.hand_on((value,))
        assign(reading, node.target, None, node.iter)
    before = dict(reading.scope.names)
    num = len(reading.conditions)
    reading.loops.append(node.lineno)
    reading.shares += shares
    if isinstance(node, ast.While):
        evaluate(reading, node.test)
    read_block(reading, node.body)
    reading.loops.pop()
    del reading.shares[len(reading.shares) - len(shares) :]
    del reading.conditions[num:]
    _merge(reading, before)
    read_block(reading, node.orelse)


def _ends_early(loop: ast.For | ast.AsyncFor | ast.While) -> bool:
    """Return whether a loop ends at a condition of its own, such as `if step >= max_steps: break`."""
    tests = [statement for statement in loop.body if isinstance(statement, ast.If)]
    return any(isinstance(statement, ast.Break) for test in tests for statement in test.body)


def _read_with(reading: Reading, node: ast.With | ast.AsyncWith) -> bool:
    num = len(reading.within)
    for item in node.items:
        value = evaluate(reading, item.context_expr)
        if item.optional_vars is not None:
            assign(reading, item.optional_vars, value, item.context_expr)
        reading.within += _what_it_does(item.context_expr, reading.scope)
    ends = read_block(reading, node.body)
    del reading.within[num:]
    return ends


def _what_it_does(context: ast.expr, scope: Scope) -> list[Within]:
    found: list[Within] = []
    for part in ast.walk(context):
        name = conditions.dotted(part, scope) if isinstance(part, (ast.Attribute, ast.Name)) else None
        found += [Within.GATHERED] if name in GATHERED else []
        found += [Within.ZERO_INIT] if name == ZERO_INIT else []
        found += _WITHOUT_GRADIENTS.get((name or "").rpartition(".")[2], ())
    if not found and _DECIDES_ABOUT_ZERO.search(ast.unparse(context)):
        found.append(Within.ZERO_CONTEXT)
    return found


def _read_try(reading: Reading, node: ast.Try | ast.TryStar) -> bool:
    ends = read_block(reading, node.body)
    _read_arms(reading, [handler.body for handler in node.handlers])
    if not ends:
        ends = read_block(reading, node.orelse)
    return read_block(reading, node.finalbody) or (ends and not node.handlers)


def _read_import(reading: Reading, node: ast.Import | ast.ImportFrom) -> None:
    for alias in node.names:
        if isinstance(node, ast.Import):
            name = alias.asname or alias.name.partition(".")[0]
            bind(reading, name, Dotted(alias.name if alias.asname else name))
        elif alias.name != "*":
            module = "." * node.level + (node.module or "")
            bind(reading, alias.asname or alias.name, Dotted(f"{module}.{alias.name}"))


def bind(reading: Reading, name: str, value: Value) -> None:
    """Let a name stand for a value."""
    reading.scope.names[name] = value


def assign(reading: Reading, target: ast.expr, value: Value, expression: ast.expr) -> None:
    """Let a target of an assignment stand for a value."""
    match target:
        case ast.Name():
            if value is None or isinstance(value, Method):  # such as accelerator.process_index
                value = conditions.rank_value(expression, reading.scope) or value
            bind(reading, target.id, own_or(value, expression, reading.scope))
            reading.scope.expressions.setdefault(target.id, []).append(expression)
        case ast.Attribute():
            owner = evaluate(reading, target.value)
            if isinstance(owner, Thing):
                owner.attributes[target.attr] = value
                if owner.kind is Kind.MODEL:  # A module's modules go where it goes.
                    calls.hand_on((value,))
            path = conditions.dotted(target, reading.scope)
            if path:
                reading.scope.expressions.setdefault(path, []).append(expression)
        case ast.Tuple() | ast.List():
            _unpack(reading, target.elts, value, expression)
        case ast.Starred():
            assign(reading, target.value, None, expression)
        case ast.Subscript():
            evaluate(reading, target.value)


def _unpack(reading: Reading, targets: list[ast.expr], value: Value, expression: ast.expr) -> None:
    values = list(value.values) if isinstance(value, Several) else []
    starred = next((number for number, target in enumerate(targets) if isinstance(target, ast.Starred)), None)
    for number, target in enumerate(targets):
        from_end = starred is not None and number > starred
        index = number - len(targets) + len(values) if from_end else number
        item = values[index] if 0 <= index < len(values) and number != starred else None
        assign(reading, target, item, expression)


def run_function(
    reading: Reading, function: LocalFunction, arguments: list[Value], keywords: dict[str, Value]
) -> Value:
    """Read a function of the script where it is called; return what it returns."""
    node = function.node
    is_too_much = len(reading.functions) >= MAX_CALL_DEPTH or reading.num_nodes > MAX_NODES
    if node in reading.functions or is_too_much:
        return None
    reading.visited.add(node)
    scope = Scope(outer=function.scope)
    _bind_parameters(scope, function, arguments, keywords)
    outer, num, num_within = reading.scope, len(reading.conditions), len(reading.within)
    reading.scope = scope
    reading.functions.append(node)
    try:
        if isinstance(node, ast.Lambda):
            return evaluate(reading, node.body)
        _enter_decorators(reading, node)
        read_block(reading, node.body)
        return scope.names.get("return") if reading.scope is scope else None
    finally:
        reading.functions.pop()
        reading.scope = outer
        del reading.conditions[num:]
        del reading.within[num_within:]


def _bind_parameters(
    scope: Scope, function: LocalFunction, arguments: list[Value], keywords: dict[str, Value]
) -> None:
    parameters = function.node.args
    positional = [parameter.arg for parameter in (*parameters.posonlyargs, *parameters.args)]
    values = [function.this, *arguments] if function.this is not None else arguments
    for name in (*positional, *(parameter.arg for parameter in parameters.kwonlyargs)):
        # Where the caller gives none, defaults are not followed: the name is unknown, and hides outer ones.
        scope.names[name] = keywords.get(name)
    scope.names.update(zip(positional, values, strict=False))


def _enter_decorators(reading: Reading, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    """Put a function's decorators into force."""
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        last = (conditions.dotted(called, reading.scope) or "").rpartition(".")[2]
        reading.within += _WITHOUT_GRADIENTS.get(last, ())
        if last in _ON_MAIN:
            reading.conditions.append(
                Condition(
                    test=decorator,
                    is_else=False,
                    rank=RankTest(is_main=True),
                    is_about_framework=False,
                    has_remainder=False,
                    is_in_turn=False,
                    depth=len(reading.loops),
                )
            )


def make_instance(
    reading: Reading, cls: LocalClass, node: ast.expr, arguments: list[Value], keywords: dict[str, Value]
) -> Thing:
    """Read what making an object of a class of the script does."""
    bases = cls.foreign_bases()
    if any(is_trainer(base) for base in bases):
        thing = calls.make_trainer(reading, node, arguments, keywords)
        thing.cls = cls
    elif any(base.endswith(("nn.Module", "PreTrainedModel")) for base in bases):
        thing = reading.make_model(node, source=ModelSource.OWN_CLASS, cls=cls)
        calls.hand_on((*arguments, *keywords.values()))
    else:
        thing = Thing(kind=Kind.OBJECT, node=node, cls=cls)
    init = cls.method("__init__")
    if init is not None:
        run_function(reading, LocalFunction(init, cls.scope, thing), arguments, keywords)
    return thing
