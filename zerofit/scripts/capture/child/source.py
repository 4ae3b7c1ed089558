"""What a script's source says of what a capture never comes to: generating, saving, evaluating."""

from __future__ import annotations

import ast
import os
import sys
from dataclasses import dataclass

from zerofit.scripts.capture.child.outcome import is_own_code

_GENERATING = frozenset({"generate"})
_SAVING = frozenset(
    {"save_pretrained", "save_state", "save_model", "save_checkpoint", "push_to_hub", "save_file"}
)
_EVALUATING = frozenset({"eval", "evaluate", "inference_mode"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """What the source calls, wherever in it."""

    generates: bool
    saves: bool
    evaluates: bool


def calls_in(text: str) -> Calls:
    """Return what a source text calls; nothing where it can't be parsed."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return Calls(generates=False, saves=False, evaluates=False)
    methods, saves_by_torch = set(), False
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            methods.add(node.func.attr)
            saves_by_torch |= ast.unparse(node.func) in ("torch.save", "accelerator.save")
    return Calls(
        generates=bool(methods & _GENERATING),
        saves=bool(methods & _SAVING) or saves_by_torch,
        evaluates=bool(methods & _EVALUATING),
    )


def calls_of_script() -> Calls:
    """Return what the running script and the modules of its own call."""
    found = [calls_in(text) for text in own_sources()]
    return Calls(
        generates=any(one.generates for one in found),
        saves=any(one.saves for one in found),
        evaluates=any(one.evaluates for one in found),
    )


def own_sources() -> list[str]:
    """Return the sources of the main module and of those beside or below it."""
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
