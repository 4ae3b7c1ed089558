"""How long a custom training loop runs, by its source and the values of its names where training begins."""

from __future__ import annotations

import ast
import builtins
import math
import os
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from zerofit.core.capture import CapturedLoop
from zerofit.scripts.capture.child.expression import value_of
from zerofit.scripts.capture.child.outcome import is_own_code

if TYPE_CHECKING:
    import types
    from collections.abc import Collection, Iterable, Iterator, Mapping

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_MAX_DEPTH = 4
"""Assignments followed from a name to the length of the data. ASSUMPTION: accelerate's examples need two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loop:
    """A loop around the first forward pass."""

    node: ast.For | ast.While
    scope: Mapping[str, Any]
    """Values of names in its function."""
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """What a loop goes through."""

    is_data: bool = False
    """True for a DataLoader, or for what may be one."""
    length: int | None = None
    """Rounds of the loop; None if unknown, and for a DataLoader, whose rounds follow from the ranks."""


class _Unit(Enum):
    """What a limit counts."""

    PASSES = auto()
    """Forward passes."""
    STEPS = auto()
    """Optimizer steps."""
    EPOCHS = auto()
    """Passes through the data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limit:
    """A number at which a loop ends."""

    count: int
    """What is left of it."""
    unit: _Unit
    expression: ast.expr
    micro_batches: int = 1
    """PASSES: those before each optimizer.step(), where an inner loop makes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """A comparison that ends a loop."""

    counter: ast.expr
    most: int
    """The counter's value at the end."""
    expression: ast.expr
    """What this value is computed from."""


def captured_loop(
    sources: Mapping[str, str], frame: types.FrameType | None, *, passes_per_step: int
) -> CapturedLoop | None:
    """Return the length of the loop around the first forward pass; None if its source shows none.

    Args:
        sources: texts of the script and of its own modules, by their files.
        frame: the innermost frame of the running script.
        passes_per_step: forward passes per optimizer step.
    """
    parsed = {os.path.abspath(file): _parsed(text) for file, text in sources.items()}
    trees = {file: tree for file, tree in parsed.items() if tree is not None}
    loops = [loop for own in _own_frames(frame) for loop in _loops(own, trees)]  # outermost first
    if not loops:
        return None
    place = _data_place(loops)
    limits = [limit for loop in loops for limit in _limits(loop, loops)]
    rounds = _rounds(loops[:1]) if place is None else None
    if rounds is not None and (found := _passes(rounds, loops, _iterated(loops[-1].node))) is not None:
        limits.append(found)  # the loop fetches batches itself
    epochs = [] if place is None else [_rounds(loops[:place])]
    epochs += [limit.count for limit in limits if limit.unit is _Unit.EPOCHS]
    num_epochs = min((number for number in epochs if number is not None and number > 0), default=None)
    counted = [limit for limit in limits if limit.count > 0 and limit.unit is not _Unit.EPOCHS]
    first = min(counted, key=lambda limit: _steps(limit, passes_per_step), default=None)
    if first is None and num_epochs is None:
        return None
    node = (loops[0] if place is None else loops[max(place - 1, 0)]).node
    return CapturedLoop(
        where=f"{os.path.basename(loops[0].file)}:{node.lineno}",
        num_epochs=num_epochs,
        max_steps=None if first is None else _steps(first, passes_per_step),
        max_steps_follow_data=first is not None and _follows_data(first.expression, trees.values()),
        micro_batches=first.micro_batches if first is not None and passes_per_step == 1 else 1,
        epochs_follow_steps=_epochs_follow_steps(loops, trees.values()),
    )


def _steps(limit: _Limit, passes_per_step: int) -> int:
    """Return a limit in optimizer steps."""
    if limit.unit is _Unit.STEPS:
        return limit.count
    return math.ceil(limit.count / (limit.micro_batches if passes_per_step == 1 else passes_per_step))


def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def _own_frames(frame: types.FrameType | None) -> list[types.FrameType]:
    """Return the script's own frames, the outermost first."""
    found = []
    while frame is not None:
        if is_own_code(frame.f_code.co_filename):
            found.append(frame)
        frame = frame.f_back
    return found[::-1]


def _loops(frame: types.FrameType, trees: Mapping[str, ast.Module]) -> Iterator[_Loop]:
    """Yield the loops of a frame's function around its current line, the outermost first."""
    file = os.path.abspath(frame.f_code.co_filename)
    tree = trees.get(file)
    if tree is None:
        return
    scope = {**vars(builtins), **frame.f_globals, **frame.f_locals}
    for node in _around(_body_of(frame, tree), frame.f_lineno):
        if isinstance(node, ast.For | ast.While):
            yield _Loop(node=node, scope=scope, file=file)


def _body_of(frame: types.FrameType, tree: ast.Module) -> list[ast.stmt]:
    if frame.f_code.co_name == "<module>":
        return tree.body
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first == frame.f_code.co_firstlineno and node.name == frame.f_code.co_name:
                return node.body
    return []


def _around(body: Iterable[ast.AST], line: int) -> Iterator[ast.AST]:
    """Yield the statements whose own body contains a line, outermost first; functions are not entered."""
    for node in body:
        if isinstance(node, _FUNCTIONS) or not isinstance(node, ast.stmt | ast.ExceptHandler):
            continue
        if node.lineno <= line <= (node.end_lineno or node.lineno):
            yield node
            yield from _around(ast.iter_child_nodes(node), line)


def _iterated(node: ast.For | ast.While) -> ast.expr:
    """Return what a loop goes through, without enumerate(), tqdm() and the like around it."""
    if isinstance(node, ast.While):
        return node.test
    found = node.iter
    while isinstance(found, ast.Call) and found.args:
        name = found.func.attr if isinstance(found.func, ast.Attribute) else getattr(found.func, "id", "")
        if name in ("range", "trange"):
            break
        found = found.args[0]
    return found


def _data_place(loops: list[_Loop]) -> int | None:
    """Return which loop goes through the DataLoader; None if none does."""
    return next((place for place, loop in enumerate(loops) if _span(loop, loops).is_data), None)


def _span(loop: _Loop, loops: list[_Loop]) -> _Span:
    """Return what a loop goes through; of a loop that is not `for`, nothing is known."""
    if isinstance(loop.node, ast.While):
        return _Span()
    return _span_of(loop.node.iter, loop.scope, is_last=loop is loops[-1])


def _span_of(node: ast.expr, scope: Mapping[str, Any], *, is_last: bool) -> _Span:
    """Return what an expression goes through.

    Args:
        node: the expression.
        scope: values of its names.
        is_last: True for the innermost loop, which goes through the data if nothing else is known.
    """
    value = value_of(node, scope)
    value = getattr(value, "iterable", value)  # of a tqdm
    if hasattr(value, "dataset") or hasattr(value, "batch_sampler"):
        return _Span(is_data=True)
    if isinstance(value, (range, list, tuple)):
        return _Span(length=len(value))
    if not isinstance(node, ast.Call):
        return _Span(is_data=value is None and is_last)  # not of a generator, which may be endless
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in ("count", "cycle", "repeat"):  # of itertools, or the script's own cycle()
        return _Span()
    if not node.args:
        return _Span(is_data=is_last)
    if name in ("range", "trange"):
        values = [value_of(word, scope) for word in node.args]
        return _Span(length=len(range(*values)) if all(type(value) is int for value in values) else None)
    if name == "zip":
        spans = [_span_of(word, scope, is_last=is_last) for word in node.args]
        lengths = [span.length for span in spans if span.length is not None]
        is_data = any(span.is_data for span in spans)
        return _Span(is_data=is_data and not lengths, length=min(lengths, default=None))
    first = _span_of(node.args[0], scope, is_last=is_last)
    if name != "islice":
        return first  # enumerate(), tqdm(), skip_first_batches() ...
    ends = [value_of(word, scope) for word in node.args[1:]]
    if not 1 <= len(ends) <= 3 or not all(type(end) is int for end in ends):
        return _Span()
    most = len(range(*ends))
    return _Span(length=most if first.length is None else min(most, first.length))


def _rounds(loops: list[_Loop]) -> int | None:
    """Return the rounds that nested loops make in all; None if unknown, as with `while True`."""
    lengths = [_span(loop, [loop]).length for loop in loops]
    known = [length for length in lengths if length is not None]
    return math.prod(known) if len(known) == len(lengths) else None


def _limits(loop: _Loop, loops: list[_Loop]) -> Iterator[_Limit]:
    """Yield the counts at which a loop ends: `while step < n`, `if step >= n: break`."""
    if isinstance(loop.node, ast.While):
        yield from _limits_of_test(loop.node.test, (ast.Lt, ast.LtE, ast.NotEq), loop, loops)
    for node in _inside(loop.node.body):
        if isinstance(node, ast.If) and any(isinstance(line, ast.Break | ast.Return) for line in node.body):
            yield from _limits_of_test(node.test, (ast.GtE, ast.Gt, ast.Eq), loop, loops)


def _limits_of_test(
    test: ast.expr, ends: tuple[type[ast.cmpop], ...], loop: _Loop, loops: list[_Loop]
) -> Iterator[_Limit]:
    parts = test.values if isinstance(test, ast.BoolOp) else [test]
    for part in parts:
        if not isinstance(part, ast.Compare) or len(part.ops) != 1 or not isinstance(part.ops[0], ends):
            continue
        others = [value_of(other, loop.scope) for other in parts if other is not part]
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) and not all(others):
            continue  # such as `step >= 100 and loss < 0.1`
        counter, most = part.left, value_of(part.comparators[0], loop.scope)
        if type(most) is not int:
            continue
        most += isinstance(part.ops[0], ast.Gt | ast.LtE)
        end = _End(counter=counter, most=most, expression=part.comparators[0])
        if (found := _by_index(end, loops) or _by_counter(end, loop, loops)) is not None:
            yield found


def _by_index(end: _End, loops: list[_Loop]) -> _Limit | None:
    """Return the limit if the counter is a loop's own index, which begins anew with each round outside."""
    for place, loop in enumerate(loops):
        if isinstance(loop.node, ast.While):
            continue
        target = loop.node.target
        index = target.elts[0] if isinstance(target, ast.Tuple) and target.elts else target
        if ast.unparse(index) == ast.unparse(end.counter):
            outside = _rounds(loops[:place])
            return None if outside is None else _below(outside * end.most, place, loops, end.expression)
    return None


def _by_counter(end: _End, loop: _Loop, loops: list[_Loop]) -> _Limit | None:
    """Return the limit if the script increments a counter by 1 in a loop."""
    increment = _increment(end.counter, loops)
    if increment is None:
        return None
    start = value_of(end.counter, loop.scope)
    count = end.most - start if type(start) is int else end.most
    if _is_of_steps(increment, loops):
        return _Limit(count=count, unit=_Unit.STEPS, expression=end.expression)
    around = [place for place, own in enumerate(loops) if increment in _inside(own.node.body)]
    return _below(count, around[-1], loops, end.expression)


def _below(count: int, place: int, loops: list[_Loop], expression: ast.expr) -> _Limit | None:
    """Return what a number of rounds of one loop means for the loops inside it; None if unknown.

    A round of the loop through the data is a batch, whatever loops are inside.
    """
    data = _data_place(loops)
    if data is None:
        return _passes(count, loops[place:], expression)
    if place == data:
        return _Limit(count=count, unit=_Unit.PASSES, expression=expression)
    epochs = _rounds(loops[place + 1 : data]) if place < data else None
    return None if epochs is None else _Limit(count=count * epochs, unit=_Unit.EPOCHS, expression=expression)


def _passes(count: int, loops: list[_Loop], expression: ast.expr) -> _Limit | None:
    """Return the limit of loops that fetch batches themselves; None if unknown.

    Args:
        count: rounds of the first loop.
        loops: nested ones; inner loops without a backward pass of their own share a batch.
        expression: what sets the count.
    """
    first, inner = loops[0].node.body, loops[1:]
    if _calls("backward", first):
        inner = [loop for loop in inner if _calls("backward", loop.node.body)]
    rounds = _rounds(inner)
    if rounds is None:
        return None
    steps_outside = _calls("step", first) and not any(_calls("step", loop.node.body) for loop in inner)
    return _Limit(
        count=count * rounds,
        unit=_Unit.PASSES,
        expression=expression,
        micro_batches=rounds if steps_outside else 1,
    )


def _calls(method: str, body: list[ast.stmt]) -> bool:
    calls = (node.func for node in _inside(body) if isinstance(node, ast.Call))
    return any(isinstance(called, ast.Attribute) and called.attr == method for called in calls)


def _increment(counter: ast.expr, loops: list[_Loop]) -> ast.stmt | None:
    """Return the `counter += 1` inside the loops; None if there is none, or a loop begins to count anew."""
    name = ast.unparse(counter)
    found: ast.stmt | None = None
    for node in _inside(loops[0].node.body):
        if isinstance(node, ast.AugAssign) and ast.unparse(node.target) == name:
            text = f"{name} + {ast.unparse(node.value)}" if isinstance(node.op, ast.Add) else ""
        elif isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets):
            text = ast.unparse(node.value)
        else:
            continue
        if text not in (f"{name} + 1", f"1 + {name}"):
            return None
        found = node
    if found is None:
        for loop in loops[1:]:
            if (found := _increment(counter, [loop])) is not None:
                break
    return found


def _is_of_steps(increment: ast.stmt, loops: list[_Loop]) -> bool:
    """Return True if a counter only counts optimizer steps: inside `if accelerator.sync_gradients`, `% k`."""
    around = (node for loop in loops for node in _around(loop.node.body, increment.lineno))
    tests = [ast.unparse(node.test) for node in around if isinstance(node, ast.If)]
    return any("sync_gradients" in test or "%" in test for test in tests)


def _inside(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield all nodes of statements, without those of functions in them."""
    for node in body:
        if not isinstance(node, _FUNCTIONS):
            yield node
            yield from _inside(ast.iter_child_nodes(node))


def _follows_data(expression: ast.expr, trees: Collection[ast.Module], depth: int = _MAX_DEPTH) -> bool:
    """Return True if the source computes an expression from the length of something, such as the data."""
    calls = (node for node in ast.walk(expression) if isinstance(node, ast.Call))
    if any(isinstance(call.func, ast.Name) and call.func.id == "len" for call in calls):
        return True
    if not depth:
        return False
    names = {ast.unparse(node) for node in ast.walk(expression) if isinstance(node, ast.Name | ast.Attribute)}
    return any(_follows_data(value, trees, depth - 1) for name in names for value in _assigned(name, trees))


def _assigned(name: str, trees: Collection[ast.Module]) -> Iterator[ast.expr]:
    """Yield the values that sources assign to a name or an attribute."""
    for node in (node for tree in trees for node in ast.walk(tree)):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            yield from (node.value for target in targets if target and ast.unparse(target) == name)


def _epochs_follow_steps(loops: list[_Loop], trees: Collection[ast.Module]) -> bool:
    """Return True if the source computes its number of epochs by division, as for a given number of steps."""
    names = {
        ast.unparse(node)
        for loop in loops
        for node in ast.walk(_iterated(loop.node))
        if isinstance(node, ast.Name | ast.Attribute)
    }
    return any(
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.FloorDiv)
        for name in names
        for value in _assigned(name, trees)
        for node in ast.walk(value)
    )
