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
    *("save_pretrained", "save_state", "save_model", "save_checkpoint", "push_to_hub", "save_file"),
    *("torch.save", "accelerator.save"),
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


def own_sources() -> list[str]:
    """Return the sources of the main module and of modules beside or below it."""
    main = getattr(sys.modules["__main__"], "__file__", None)
    if main is None:
        return []
    folder = os.path.dirname(os.path.abspath(main)) + os.sep
    files = {main}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.startswith(folder) and file.endswith(".py") and is_own_code(file):
            files.add(file)
    texts = []
    for file in sorted(files):
        try:
            with open(file, encoding="utf-8") as opened:
                texts.append(opened.read())
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
        expressions = (one for one in ast.walk(tree) if isinstance(one, ast.expr))
        # ast.walk reaches the whole condition before its parts.
        test = next((one for one in expressions if (one.lineno, one.col_offset) == at), None)
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
