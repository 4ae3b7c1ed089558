"""Determines from its source whether the training code steps its optimizer itself.

Under DeepSpeed some scripts leave the step to accelerate, which runs it inside backward().
"""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import sysconfig
from traceback import walk_stack

from zerofit.core.errors import Unreadable
from zerofit.scripts.facts import Action
from zerofit.scripts.source.read_script import read_script

_INSTALLED = ("/site-packages/", "/dist-packages/")
_LIBRARIES = ("accelerate", "deepspeed", "torch", "transformers", "zerofit")
"""Packages between a training loop and its backward pass, wherever they come from."""


def script_steps() -> bool:
    """Return True if any code of the script, or the calling code, steps an optimizer.

    Assumed True if some of the running code can't be read.
    """
    sources, is_all = _sources()
    return not is_all or any(steps_optimizer(source) for source in sources if ".step(" in source)


def script_clips() -> bool:
    """Return True if any code of the script, or the calling code, may clip gradients by norm."""
    sources, is_all = _sources()
    return not is_all or any("clip_grad_norm_" in source for source in sources)


def steps_optimizer(source: str) -> bool:
    """Return True if a source steps an optimizer under DeepSpeed too."""
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


def _sources() -> tuple[tuple[str, ...], bool]:
    """Return the sources of the script's modules and of the running code, and whether they are complete.

    Running code counts wherever it is: a training loop may be installed as a package.
    """
    texts = {_text_of(file) for file in _script_files()}
    running = {
        _text_of(frame.f_code.co_filename)
        for frame, _ in walk_stack(inspect.currentframe())
        if not _is_library(str(frame.f_globals.get("__name__", "")))
    }
    is_all = bool(running) and "" not in running
    return tuple(sorted((texts | running) - {""})), is_all


def _is_library(name: str) -> bool:
    top = name.partition(".")[0]
    return top in _LIBRARIES or top in sys.stdlib_module_names


def _script_files() -> set[str]:
    """Return the files of all modules that are neither installed nor Python's own."""
    standard = sysconfig.get_paths()["stdlib"]
    files = {
        str(getattr(module, "__file__", None))
        for name, module in tuple(sys.modules.items())
        if not _is_library(name)
    }
    return {
        file
        for file in files
        if file.endswith(".py")
        and not file.startswith(standard)
        and not any(part in file for part in _INSTALLED)
    }


def _text_of(file: str) -> str:
    """Return the text of a file, or of a notebook's cell; "" if there is none."""
    return "".join(linecache.getlines(file))
