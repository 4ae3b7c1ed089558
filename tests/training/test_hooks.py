"""The lists of hooks: their order, and that none is forgotten."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import zerofit.training
from zerofit.training.hooks import ACCELERATOR_HOOKS, MODULE_HOOKS, TRAINER_HOOKS

_WING = Path(zerofit.training.__file__).parent

_LISTS = {"modules": MODULE_HOOKS, "Accelerator": ACCELERATOR_HOOKS, "Trainer": TRAINER_HOOKS}
_USED_ELSEWHERE = {
    "zerofit.training.generate_hooks.install",  # by a function of hooks.py, which gives it its limit
    "zerofit.training.hooks.install",
    "zerofit.training.hooks.install_all",
    "zerofit.training.setup.trainer_arguments.install_arguments",  # by one of hooks.py, and for subclasses
}


def test_hooks_stand_in_this_order(golden: Callable[[str, str], None]) -> None:
    """Of two that wrap one method the first is the outermost: who moves one changes what it sees."""
    lists = (f"{of}:\n" + "".join(f"  {one.name}\n" for one in hooks) for of, hooks in _LISTS.items())
    golden("".join(lists), "hooks.txt")


def test_every_install_function_of_the_wing_stands_in_a_list() -> None:
    found = {
        ".".join(("zerofit.training", *path.relative_to(_WING).with_suffix("").parts, node.name))
        for path in _WING.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.lstrip("_").startswith("install")
    }
    installs = [hook.install for hooks in _LISTS.values() for hook in hooks]
    listed = {f"{install.__module__}.{install.__name__}" for install in installs}
    assert found == listed | _USED_ELSEWHERE
