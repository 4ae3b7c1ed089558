"""Facts from source code that a capture does not reach: generation, saving, manual accumulation."""

from __future__ import annotations

import ast
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import Unreadable
from zerofit.scripts.capture.child.outcome import is_own_code
from zerofit.scripts.facts import Action
from zerofit.scripts.source.read_script import read_script

if TYPE_CHECKING:
    import types
    from collections.abc import Iterable, Iterator

    from zerofit.scripts.capture.child.observations import Observations

_SAVING = {
    "save_pretrained",
    "save_state",
    "save_model",
    "save_checkpoint",
    "push_to_hub",
    "save_file",
    "torch.save",
    "accelerator.save",
}
_EVALUATING = {"eval", "evaluate", "inference_mode"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledMethods:
    """Names that sources call anywhere."""

    generates: bool
    saves: bool
    evaluates: bool


def called_methods(texts: Iterable[str]) -> CalledMethods:
    """Return the calls in source texts; empty for one that can't be parsed."""
    called: set[str] = set()
    for text in texts:
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                called |= {node.func.attr, ast.unparse(node.func)}
    return CalledMethods(
        generates="generate" in called, saves=bool(called & _SAVING), evaluates=bool(called & _EVALUATING)
    )


def own_sources() -> dict[str, str]:
    """Return the sources of the main module and of modules beside or below it, by their files."""
    main = getattr(sys.modules["__main__"], "__file__", None)
    if main is None:
        return {}
    folder = os.path.dirname(os.path.abspath(main)) + os.sep
    files = {main}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.startswith(folder) and file.endswith(".py") and is_own_code(file):
            files.add(file)
    texts = {}
    for file in sorted(files):
        try:
            with open(file, encoding="utf-8") as opened:
                texts[file] = opened.read()
        except (OSError, UnicodeDecodeError):
            continue
    return texts


def manual_accumulation(
    seen: Observations, texts: Iterable[str], frame: types.FrameType | None
) -> int | None:
    """Return the forward passes that a loop counts before each optimizer.step(); None if it does not count.

    Args:
        seen: the capture, which gets a note if the loop counts up to an unknown number.
        texts: sources of the script and of its own modules.
        frame: the innermost frame of the running script, for looking up names in the condition.
    """
    counts = [count for text in texts for count in _counts(text)]
    scopes = [scope for own in _own_frames(frame) for scope in (own.f_locals, own.f_globals)]
    for count in counts:
        for scope in scopes:
            value = _value(count, scope)
            if type(value) is int and value > 0:
                return value
    if counts:
        said = ast.unparse(counts[0])
        seen.note(f"the optimizer only steps after every {said} batches, a number that is unknown")
    return None


def _counts(text: str) -> Iterator[ast.expr]:
    """Yield k of each `x % k` in a condition under which an optimizer steps."""
    try:
        facts = read_script(text, name="")
        tree = ast.parse(text)
    except (Unreadable, SyntaxError, ValueError):
        return
    for call in facts.find(Action.STEP):
        if call.every_few_steps is None:
            continue
        place = call.every_few_steps.place
        at = (place.line, place.column - 1)
        expressions = (expression for expression in ast.walk(tree) if isinstance(expression, ast.expr))
        # ast.walk reaches the whole condition before its parts.
        test = next(
            (expression for expression in expressions if (expression.lineno, expression.col_offset) == at),
            None,
        )
        for node in ast.walk(test) if test is not None else ():
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
                yield node.right


def _own_frames(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    while frame is not None:
        if is_own_code(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _value(node: ast.expr, scope: Any) -> Any:
    """Return the value of a number, a name, an attribute or an item; None if unknown."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return scope.get(node.id)
    try:
        if isinstance(node, ast.Attribute):
            return getattr(_value(node.value, scope), node.attr)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            return _value(node.value, scope)[node.slice.value]
    except Exception:  # arbitrary objects of the script
        return None
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Edits:
    """Where sources edit by hand what an engine shards; "train.py:41", empty if nowhere."""

    gradients: str
    weights: str


def edits_by_hand(texts: dict[str, str]) -> Edits:
    """Return the first lines that edit gradients, and weights in a training loop.

    Args:
        texts: sources by their files; the main module's need not come first.
    """
    gradients, weights = [], []
    for file, text in texts.items():
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        name = os.path.basename(file)
        gradients += [f"{name}:{line}" for line in sorted(_gradient_lines(tree))]
        weights += [f"{name}:{line}" for line in sorted(_weight_lines(tree))]
    return Edits(gradients=next(iter(gradients), ""), weights=next(iter(weights), ""))


_OF_OPTIMIZERS = ("__init__", "step", "zero_grad")
"""Methods of an optimizer that work on the parameters it gets, which an engine may have joined."""


def _gradient_lines(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that read or write `.grad`, or make a graph of gradients."""
    if isinstance(tree, ast.ClassDef) and any("Optimizer" in ast.unparse(base) for base in tree.bases):
        inside: Iterable[ast.AST] = (
            node for node in tree.body if getattr(node, "name", "") not in _OF_OPTIMIZERS
        )
    else:
        inside = ast.iter_child_nodes(tree)
    if isinstance(tree, ast.Assign) and _is_none(tree.value):
        return  # p.grad = None zeroes it
    if isinstance(tree, ast.Attribute) and tree.attr == "grad" and "autograd" not in ast.unparse(tree.value):
        yield tree.lineno
    if isinstance(tree, ast.keyword) and tree.arg == "create_graph" and _is_true(tree.value):
        yield tree.value.lineno
    for node in inside:
        yield from _gradient_lines(node)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _weight_lines(tree: ast.AST) -> Iterator[int]:
    """Yield the lines in training loops that write to the elements of a loop over parameters."""
    for loop in ast.walk(tree):
        if not isinstance(loop, ast.For | ast.While) or not _calls(loop, ("backward", "step")):
            continue
        for inner in ast.walk(loop):
            if isinstance(inner, ast.For) and "parameters(" in ast.unparse(inner.iter):
                names = {node.id for node in ast.walk(inner.target) if isinstance(node, ast.Name)}
                yield from (line for part in inner.body for line in _written_lines(part, names))


def _written_lines(part: ast.AST, names: set[str]) -> Iterator[int]:
    for node in ast.walk(part):
        if not isinstance(node, ast.Attribute):
            continue
        owner = node.value
        if isinstance(owner, ast.Attribute) and owner.attr == "data":
            owner = owner.value
        is_named = isinstance(owner, ast.Name) and owner.id in names
        writes = node.attr == "data" and isinstance(node.ctx, ast.Store)
        in_place = node.attr.endswith("_") and not node.attr.startswith("_") and node.attr != "requires_grad_"
        if is_named and (writes or in_place):
            yield node.lineno


def _calls(loop: ast.AST, methods: tuple[str, ...]) -> bool:
    calls = (node.func for node in ast.walk(loop) if isinstance(node, ast.Call))
    return any(isinstance(called, ast.Attribute) and called.attr in methods for called in calls)
