"""Interprets a script's statements and expressions in execution order, functions where they are called."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from zerofit.scripts.facts import Action, ModelConstructor, ModelState
from zerofit.scripts.source import calls, conditions, config_reads, names, parsers, weights, wrappers
from zerofit.scripts.source.reading import CallSite, Condition, ContextEffect, wrapped
from zerofit.scripts.source.shares import is_round_robin, is_share, share_or
from zerofit.scripts.source.values import (
    Constant,
    Dotted,
    HalfOfRun,
    LocalClass,
    LocalFunction,
    Mapping,
    Method,
    ObjectKind,
    RankTest,
    Scope,
    Several,
    Share,
    TrackedObject,
    join,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerofit.scripts.source.reading import Reading
    from zerofit.scripts.source.values import Value

MAX_CALL_DEPTH = 12
"""Maximum call depth. ASSUMPTION: training scripts reach their loop in half of it."""
MAX_NODES = 300_000
"""Maximum number of statements, functions counted at each call. ASSUMPTION: real scripts have far fewer."""
_WITHOUT_GRADIENTS = {
    "no_grad": (ContextEffect.NO_GRADIENTS,),
    "inference_mode": (ContextEffect.NO_GRADIENTS, ContextEffect.INFERENCE_MODE),
}
_AFFECTS_ZERO = re.compile(r"zero|deepspeed|ContextManagers", re.IGNORECASE)
"""Such as accelerate's zero3_init_context_manager(), and wrappers of it in diffusers' scripts."""
_ON_MAIN = {"on_main_process", "on_local_main_process", "on_process", "on_local_process"}
_EXITS = {"exit", "quit", "sys.exit", "os._exit"}
_SETS_ACCUMULATION = ("gradient_accumulation_steps", "num_steps", "gradient_state")
_ACCUMULATES = ("accumulate", "no_sync")


def read_block(reading: Reading, statements: Sequence[ast.stmt]) -> bool:
    """Interpret statements; return True if the code after them is unreachable."""
    return any(_read_statement(reading, statement) for statement in statements)


def _read_statement(reading: Reading, node: ast.stmt) -> bool:
    reading.num_nodes += 1
    bound = reading.scope.names
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
            tests = [_match_arm_test(case, node.subject) for case in node.cases]
            _read_arms(reading, [case.body for case in node.cases], tests)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            bound[node.name] = LocalFunction(node, reading.scope)
        case ast.ClassDef():
            bases = tuple(evaluate(reading, base) for base in node.bases)
            bound[node.name] = LocalClass(node, reading.scope, bases)
        case ast.Import() | ast.ImportFrom():
            _read_import(reading, node)
        case ast.Assign():
            value = evaluate(reading, node.value)
            for target in node.targets:
                _assign(reading, target, value, node.value)
        case ast.AnnAssign() if node.value is not None:
            _assign(reading, node.target, evaluate(reading, node.value), node.value)
        case ast.AugAssign():
            evaluate(reading, node.value)
            _assign(reading, node.target, None, node.value)
        case ast.Return():
            value = share_or(evaluate(reading, node.value), node.value, reading.scope) if node.value else None
            bound["return"] = join(bound["return"], value) if "return" in bound else value
            return True
        case ast.Raise() | ast.Continue() | ast.Break():
            return True
        case ast.Delete():
            for target in node.targets:
                if isinstance(target, ast.Subscript):
                    config_reads.mark_changed((evaluate(reading, target.value),))
        case ast.Expr():
            config_reads.drop(reading, evaluate(reading, node.value))
            called = node.value.func if isinstance(node.value, ast.Call) else None
            return called is not None and conditions.dotted(called, reading.scope) in _EXITS
        case ast.Assert():
            evaluate(reading, node.test)
    return False


def _condition(reading: Reading, test: ast.expr, *, is_else: bool) -> Condition:
    rank = conditions.rank_test(test, reading.scope)
    if rank is not None and is_else:
        # After "main and x" the main rank continues too, if x is false.
        has_more = isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And)
        rank = None if has_more else RankTest(is_main=not rank.is_main)
    facts = conditions.facts_of_test(test, is_else=is_else)
    return Condition(
        test=test,
        needs=parsers.needs_of(facts, reading.scope),
        is_else=is_else,
        rank=rank,
        is_about_framework=conditions.names_framework(test),
        has_remainder=conditions.has_remainder(test, reading.scope),
        period=conditions.period_of(test, reading.scope),
        period_argument=conditions.period_argument_of(test, reading.scope),
        is_round_robin=bool(reading.loops) and is_round_robin(test, reading.scope, is_else=is_else),
        depth=len(reading.loops),
    )


def _read_if(reading: Reading, node: ast.If) -> bool:
    evaluate(reading, node.test)
    before = dict(reading.scope.names)
    num = len(reading.conditions)
    if not conditions.is_main_guard(node.test):
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
        # The rest of this block is the other side: "if not is_main: return". Facts from an early exit inside
        # remain too: "elif only_predict: return".
        reading.conditions += of_else
    elif ends_else and not ends:
        reading.scope.names = after_body
        reading.conditions += of_body
    elif not ends:
        halves = _halves_of_run(reading, node.test, after_body)
        _merge(reading, after_body)
        reading.scope.names.update(halves)
    return ends and ends_else


def _halves_of_run(reading: Reading, test: ast.expr, after_body: dict[str, Value]) -> dict[str, Value]:
    """Return the names that are a number format behind a condition on the mixed precision."""
    bound = reading.scope.names
    if conditions.is_fp16_test(test):
        return {name: HalfOfRun() for name, value in after_body.items() if weights.is_half(value)}
    if not conditions.is_about_precision(test):
        return {}
    return {name: value for name, value in bound.items() if isinstance(value, HalfOfRun)}


def _merge(reading: Reading, other: dict[str, Value]) -> None:
    bound = reading.scope.names
    for name, value in other.items():
        bound[name] = join(value, bound[name]) if name in bound else value


def _match_arm_test(case: ast.match_case, subject: ast.expr) -> ast.expr:
    """Return the equivalent `if` condition of a `match` arm; its position if it does not compare a value."""
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
    is_own = isinstance(share_or(value, over, reading.scope), Share) and not _ends_early(node)
    shares = [over] if is_own else []
    if not isinstance(node, ast.While):
        weights.mark_open(node.iter, lambda owner: evaluate(reading, owner))
        calls.mark_escaped((value,))
        _assign(reading, node.target, None, node.iter)
    before = dict(reading.scope.names)
    num = len(reading.conditions)
    reading.loops.append(node.lineno)
    reading.loop_nodes.append(node)
    reading.shares += shares
    if isinstance(node, ast.While):
        evaluate(reading, node.test)
    read_block(reading, node.body)
    reading.loops.pop()
    reading.loop_nodes.pop()
    del reading.shares[len(reading.shares) - len(shares) :]
    del reading.conditions[num:]
    _merge(reading, before)
    read_block(reading, node.orelse)


def _ends_early(loop: ast.For | ast.AsyncFor | ast.While) -> bool:
    """Return True if a loop ends at a condition of its own, such as `if step >= max_steps: break`."""
    tests = [statement for statement in loop.body if isinstance(statement, ast.If)]
    return any(isinstance(statement, ast.Break) for test in tests for statement in test.body)


def _read_with(reading: Reading, node: ast.With | ast.AsyncWith) -> bool:
    num, num_first = len(reading.within), len(reading.one_after_other)
    for item in node.items:
        value = evaluate(reading, item.context_expr)
        if item.optional_vars is not None:
            _assign(reading, item.optional_vars, value, item.context_expr)
        reading.within += _effects_of(item.context_expr, reading.scope)
        reading.one_after_other += [item.context_expr] * conditions.is_main_first(item.context_expr)
    ends = read_block(reading, node.body)
    del reading.within[num:], reading.one_after_other[num_first:]
    return ends


def _effects_of(context: ast.expr, scope: Scope) -> list[ContextEffect]:
    found: list[ContextEffect] = []
    for part in ast.walk(context):
        name = conditions.dotted(part, scope) if isinstance(part, (ast.Attribute, ast.Name)) else None
        found += [ContextEffect.ACCUMULATES] if (name or "").endswith(".accumulate") else []
        found += [ContextEffect.GATHERED] if name in names.GATHERED else []
        found += [ContextEffect.ZERO_INIT] if name == names.ZERO_INIT else []
        found += _WITHOUT_GRADIENTS.get((name or "").rpartition(".")[2], ())
    if not found and _AFFECTS_ZERO.search(ast.unparse(context)):
        found.append(ContextEffect.ZERO_CONTEXT)
    return found


def _read_try(reading: Reading, node: ast.Try | ast.TryStar) -> bool:
    with reading.inside(ContextEffect.GUARDED, if_=bool(node.handlers)):
        ends = read_block(reading, node.body)
    _read_arms(reading, [handler.body for handler in node.handlers])
    ends = ends or read_block(reading, node.orelse)
    return read_block(reading, node.finalbody) or (ends and not node.handlers)


def _read_import(reading: Reading, node: ast.Import | ast.ImportFrom) -> None:
    for alias in node.names:
        if isinstance(node, ast.Import):
            name = alias.asname or alias.name.partition(".")[0]
            reading.scope.names[name] = Dotted(alias.name if alias.asname else name)
        elif alias.name != "*":
            module = "." * node.level + (node.module or "")
            reading.scope.names[alias.asname or alias.name] = Dotted(f"{module}.{alias.name}")


def _assign(reading: Reading, target: ast.expr, value: Value, expression: ast.expr) -> None:
    match target:
        case ast.Name():
            if value is None or isinstance(value, Method):  # such as accelerator.process_index
                value = conditions.rank_value(expression, reading.scope) or value
            reading.scope.names[target.id] = share_or(value, expression, reading.scope)
            reading.scope.expressions.setdefault(target.id, []).append(expression)
        case ast.Attribute():
            owner = evaluate(reading, target.value)
            reading.sets_accumulation |= target.attr in _SETS_ACCUMULATION
            reading.scope.expressions.setdefault(ast.unparse(target), []).append(expression)
            if isinstance(owner, TrackedObject):
                owner.attributes[target.attr] = value
                if owner.kind is ObjectKind.MODEL:  # A module's submodules follow it.
                    calls.mark_escaped((value,))
        case ast.Tuple() | ast.List():
            _unpack(reading, target.elts, value, expression)
        case ast.Starred():
            _assign(reading, target.value, None, expression)
        case ast.Subscript():
            config_reads.mark_changed((evaluate(reading, target.value),))
            reading.scope.expressions.setdefault(ast.unparse(target), []).append(expression)
            reading.conditional |= {expression} if reading.conditions else set()


def _unpack(reading: Reading, targets: list[ast.expr], value: Value, expression: ast.expr) -> None:
    values = list(value.values) if isinstance(value, Several) else []
    starred = next((number for number, target in enumerate(targets) if isinstance(target, ast.Starred)), None)
    for number, target in enumerate(targets):
        from_end = starred is not None and number > starred
        index = number - len(targets) + len(values) if from_end else number
        item = values[index] if 0 <= index < len(values) and number != starred else None
        _assign(reading, target, item, expression)


def evaluate(reading: Reading, node: ast.expr) -> Value:
    """Return the value of an expression, and record the calls in it."""
    match node:
        case ast.Constant():
            is_plain = isinstance(node.value, (str, int, float, bool, type(None)))
            return Constant(node.value) if is_plain else None  # type: ignore[arg-type]
        case ast.Name():
            value = reading.scope.look_up(node.id)
            is_foreign = value is None and node.id == "accelerator"
            return _foreign_accelerator(reading, node) if is_foreign else value
        case ast.Attribute():
            return _attribute(reading, node)
        case ast.Call():
            return _call(reading, node)
        case ast.Tuple() | ast.List():
            return _several(reading, node)
        case ast.Dict():
            return _mapping(reading, node)
        case ast.IfExp():
            return _choice(reading, node)
        case ast.Lambda():
            return LocalFunction(node, reading.scope)
        case ast.NamedExpr():
            reading.scope.names[node.target.id] = value = evaluate(reading, node.value)
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
    # A sum of a thousand strings is nested a thousand levels deep on its left side.
    while isinstance(node, ast.BinOp):
        pending.append(node.right)
        node = node.left
    parts = (node, *reversed(pending)) if pending else ast.iter_child_nodes(node)
    for part in parts:
        if isinstance(part, ast.expr):
            evaluate(reading, part)


def _foreign_accelerator(reading: Reading, node: ast.expr) -> TrackedObject:
    reading.has_foreign_accelerator = True
    return TrackedObject(kind=ObjectKind.ACCELERATOR, node=node)


def _attribute(reading: Reading, node: ast.Attribute) -> Value:
    owner = evaluate(reading, node.value)
    if node.attr in _ACCUMULATES:
        # Called or not: some scripts store the method, and call it elsewhere.
        reading.record(Action.ACCUMULATE, node)
    if isinstance(owner, Dotted):
        return Dotted(f"{owner.name}.{node.attr}")
    if isinstance(owner, LocalClass):
        method = owner.method(node.attr)
        if method is not None:
            return LocalFunction(method, owner.scope)
        base = next((base for base in owner.foreign_bases() if names.is_model_class(base)), None)
        return Dotted(f"{base}.{node.attr}") if base else None
    if isinstance(owner, TrackedObject) and owner.kind is ObjectKind.NAMESPACE:
        return None
    if isinstance(owner, TrackedObject):
        return _attribute_of_object(reading, owner, node)
    return _foreign_accelerator(reading, node) if owner is None and node.attr == "accelerator" else None


def _attribute_of_object(reading: Reading, owner: TrackedObject, node: ast.Attribute) -> Value:
    if node.attr in owner.attributes:
        return owner.attributes[node.attr]
    if owner.kind is ObjectKind.TRAINER:
        if node.attr == "accelerator":
            return TrackedObject(kind=ObjectKind.ACCELERATOR, node=node)
        if node.attr in ("model", "model_wrapped", "deepspeed"):
            state = ModelState.IN_ENGINE if node.attr == "model" else ModelState.ENGINE
            unknown = TrackedObject(kind=ObjectKind.MODEL, node=node, state=state)
            return wrapped(owner.of, node, state) if owner.of else unknown
    if owner.kind is ObjectKind.MODEL and node.attr == "module" and owner.state is ModelState.ENGINE:
        return wrapped(owner, node, ModelState.IN_ENGINE)
    wrappers.note_attribute(reading, owner, node)
    if owner.kind is ObjectKind.TOKENS and node.attr == "sequences":
        return owner
    method = owner.cls.method(node.attr) if owner.cls else None
    if method is not None and owner.cls and owner.kind is not ObjectKind.MODEL:
        is_property = any(isinstance(item, ast.Name) for item in method.decorator_list)
        return None if is_property else LocalFunction(method, owner.cls.scope, owner)
    if owner.kind is ObjectKind.OTHER and node.attr == "accelerator":
        return _foreign_accelerator(reading, node)
    return Method(owner, node.attr)


def _several(reading: Reading, node: ast.Tuple | ast.List) -> Value:
    values: list[Value] = []
    for item in node.elts:
        value = evaluate(reading, item)
        if not isinstance(item, ast.Starred):
            values.append(value)
        elif isinstance(value, Several):
            values += value.values
        else:
            return None
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
    if any(key == "zero_optimization" for key, _ in values):  # DeepSpeed's
        return config_reads.literal_of(node)
    return Mapping(tuple(values))


def _choice(reading: Reading, node: ast.IfExp) -> Value:
    evaluate(reading, node.test)
    found: list[Value] = []
    for arm, is_else in ((node.body, False), (node.orelse, True)):
        reading.conditions.append(_condition(reading, node.test, is_else=is_else))
        found.append(evaluate(reading, arm))
        reading.conditions.pop()
    if isinstance(found[0], TrackedObject) or isinstance(found[1], TrackedObject):
        return join(found[0], found[1])
    if conditions.is_fp16_test(node.test) and weights.is_half(found[0]):
        return HalfOfRun()
    return found[0] if found[0] == found[1] else None


def _item(reading: Reading, node: ast.Subscript) -> Value:
    value = evaluate(reading, node.value)
    evaluate(reading, node.slice)
    key = node.slice.value if isinstance(node.slice, ast.Constant) else None
    if isinstance(value, TrackedObject) and value.kind is ObjectKind.CONFIG:
        return value  # a section of it, which the script may change
    if isinstance(value, TrackedObject) and value.kind is ObjectKind.TOKENS:
        return value if _leaves_length_open(node.slice) else None
    if isinstance(value, Several) and isinstance(key, int):
        return value.values[key] if key < len(value.values) else None
    if isinstance(value, Mapping) and key is not None:
        return dict(value.values).get(str(key))
    return None


def _leaves_length_open(part: ast.expr) -> bool:
    """Return True if a slice of generated tokens has a variable length: a row, or `[:, prompt_length:]`."""
    last = part.elts[-1] if isinstance(part, ast.Tuple) and part.elts else None
    return last is None or (isinstance(last, ast.Slice) and last.upper is None)


def _negative(reading: Reading, node: ast.UnaryOp) -> Value:
    value = evaluate(reading, node.operand)
    number = value.value if isinstance(value, Constant) else None
    return Constant(-number) if isinstance(node.op, ast.USub) and isinstance(number, (int, float)) else None


def _comprehension(
    reading: Reading, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
) -> None:
    outer = reading.scope.names
    reading.scope.names = dict(outer)
    shares = [generator.iter for generator in node.generators if is_share(generator.iter, reading.scope)]
    for generator in node.generators:
        calls.mark_escaped((evaluate(reading, generator.iter),))
        for name in ast.walk(generator.target):
            if isinstance(name, ast.Name):
                reading.scope.names[name.id] = None
        for test in generator.ifs:
            evaluate(reading, test)
    reading.shares += shares
    for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
        evaluate(reading, part)
    del reading.shares[len(reading.shares) - len(shares) :]
    reading.scope.names = outer


def _call(reading: Reading, node: ast.Call) -> Value:
    """Record a call and those in its arguments, and return its result."""
    callee = evaluate(reading, node.func)
    call = _call_site(reading, node)
    is_adding = isinstance(callee, Dotted) and callee.name in names.DEEPSPEED_ARGUMENTS
    if not isinstance(callee, LocalFunction) and not is_adding:
        parsers.mark_options_unknown(call.values)
    match callee:
        case Dotted():
            return calls.call_library(reading, callee.name, call)
        case LocalFunction():
            for place, argument in enumerate(node.args[: len(call.arguments)]):
                call.arguments[place] = share_or(call.arguments[place], argument, reading.scope)
                weights.record_gathered(reading, callee, argument, lambda owner: evaluate(reading, owner))
            result = run_function(reading, callee, call)
            return calls.iterator_over(call) if result is None and weights.yields(callee.node) else result
        case LocalClass():
            return make_instance(reading, callee, call)
        case Method():
            found = calls.call_method(reading, callee, call)
            return run_function(reading, found, call) if isinstance(found, LocalFunction) else found
        case TrackedObject(kind=ObjectKind.MODEL):
            reading.record(Action.FORWARD, node, callee)
            return None
    return calls.call_unknown(reading, call)


def _call_site(reading: Reading, node: ast.Call) -> CallSite:
    call = CallSite(node=node)
    for argument in node.args:
        value = evaluate(reading, argument)
        if not isinstance(argument, ast.Starred):
            call.arguments.append(value)
        else:
            call.arguments.extend(value.values if isinstance(value, Several) else [None])
    for keyword in node.keywords:
        value = evaluate(reading, keyword.value)
        if keyword.arg is not None:
            call.keywords[keyword.arg] = value
        elif isinstance(value, Mapping):
            call.keywords.update(value.values)
    return call


def run_function(reading: Reading, function: LocalFunction, call: CallSite) -> Value:
    """Interpret a function of the script where it is called, and return its result."""
    node = function.node
    is_too_much = len(reading.functions) >= MAX_CALL_DEPTH or reading.num_nodes > MAX_NODES
    if node in reading.functions or is_too_much:
        return None
    reading.visited.add(node)
    scope = Scope(outer=function.scope)
    _bind_parameters(scope, function, call)
    outer, num, num_within = reading.scope, len(reading.conditions), len(reading.within)
    reading.scope = scope
    reading.functions.append(node)
    try:
        if isinstance(node, ast.Lambda):
            return evaluate(reading, node.body)
        _enter_decorators(reading, node)
        read_block(reading, node.body)
        config_reads.drop_locals(reading, node, scope)
        return scope.names.get("return") if reading.scope is scope else None
    finally:
        reading.functions.pop()
        reading.scope = outer
        del reading.conditions[num:]
        del reading.within[num_within:]


def _bind_parameters(scope: Scope, function: LocalFunction, call: CallSite) -> None:
    parameters = function.node.args
    positional = [parameter.arg for parameter in (*parameters.posonlyargs, *parameters.args)]
    values = [function.this, *call.arguments] if function.this is not None else call.arguments
    for name in (*positional, *(parameter.arg for parameter in parameters.kwonlyargs)):
        # Defaults of missing arguments are not tracked: the name is unknown, and shadows outer ones.
        scope.names[name] = call.keywords.get(name)
    scope.names.update(zip(positional, values, strict=False))


def _enter_decorators(reading: Reading, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        last = (conditions.dotted(called, reading.scope) or "").rpartition(".")[2]
        reading.within += _WITHOUT_GRADIENTS.get(last, ())
        if last in _ON_MAIN:
            on_main = Condition(test=decorator, rank=RankTest(is_main=True), depth=len(reading.loops))
            reading.conditions.append(on_main)


def make_instance(reading: Reading, cls: LocalClass, call: CallSite) -> TrackedObject:
    """Interpret the creation of an object of a class of the script."""
    bases = cls.foreign_bases()
    if any(names.is_trainer(base) for base in bases):
        tracked = calls.make_trainer(reading, call)
        tracked.cls = cls
    elif any(base.endswith(("nn.Module", "PreTrainedModel")) for base in bases):
        tracked = reading.make_model(call.node, source=ModelConstructor.OWN_CLASS, cls=cls)
        calls.mark_escaped(call.values)
    else:
        tracked = TrackedObject(kind=ObjectKind.OTHER, node=call.node, cls=cls)
    init = cls.method("__init__")
    if init is not None:
        run_function(reading, LocalFunction(init, cls.scope, tracked), call)
    return tracked
