"""Whether the code that trains steps its optimizer itself, as its source shows.

Under DeepSpeed some scripts leave the step to accelerate, which takes it inside backward().
"""

from __future__ import annotations

import ast
import inspect
import sys
import sysconfig
from typing import TYPE_CHECKING

from zerofit.documents.limits import Unreadable
from zerofit.script_reading.read import read_script
from zerofit.script_words import Action

if TYPE_CHECKING:
    from collections.abc import Iterator

_INSTALLED = ("/site-packages/", "/dist-packages/")
_LIBRARIES = ("accelerate", "deepspeed", "torch", "transformers", "zerofit")
"""Packages that stand between a training loop and its backward pass, wherever they come from."""


def script_steps() -> bool:
    """Return whether any code of the script, or the code that calls this, steps an optimizer."""
    return any(steps_optimizer(source) for source in _sources())


def steps_optimizer(source: str) -> bool:
    """Return whether a source steps an optimizer under DeepSpeed too.

    Args:
        source: text of a Python file.
    """
    try:
        seen = read_script(source, name="").find(Action.STEP)
    except Unreadable:
        return True
    if seen:
        return any(not call.is_engine_checked for call in seen)
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "step"
        and "sched" not in ast.unparse(node.func.value).lower()
        for node in ast.walk(ast.parse(source))
    )


def _sources() -> Iterator[str]:
    """Yield the sources of the script's modules, and of those that are running, that call a step()."""
    names = {name: getattr(module, "__file__", None) for name, module in tuple(sys.modules.items())}
    frame = inspect.currentframe()
    while frame is not None:
        names.setdefault(frame.f_globals.get("__name__", ""), frame.f_code.co_filename)
        frame = frame.f_back
    files = {str(file) for name, file in names.items() if name.partition(".")[0] not in _LIBRARIES}
    standard = sysconfig.get_paths()["stdlib"]
    for file in sorted(files):
        if not file.endswith(".py") or file.startswith(standard) or any(part in file for part in _INSTALLED):
            continue
        try:
            with open(file, encoding="utf-8") as stream:
                source = stream.read()
        except (OSError, UnicodeDecodeError):
            continue
        if ".step(" in source:
            yield source
