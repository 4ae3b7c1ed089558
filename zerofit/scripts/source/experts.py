"""Experts in a script's own model: loops over a ModuleList in which the data decides what runs."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerofit.scripts.facts import Sighting
    from zerofit.scripts.source.source import Source

_EXPERTS = re.compile(r"expert", re.IGNORECASE)
_FROM_DATA = re.compile(
    r"\.(any|numel|sum|nelement|size|shape|item|nonzero|tolist)\b|\blen\(|torch\.(any|numel|sum|where)\b"
)


def routed_experts(tree: ast.Module, source: Source) -> tuple[Sighting, ...]:
    """Return the loops over experts whose call depends on the data."""
    found: list[Sighting] = []
    for cls in ast.walk(tree):
        if isinstance(cls, ast.ClassDef):
            lists = _module_lists(cls)
            found += [source.sight(loop.iter) for loop in _loops(cls) if _is_routed(loop, lists)]
    return tuple(found)


def _module_lists(cls: ast.ClassDef) -> set[str]:
    """Return the attributes of a class that hold a ModuleList and are named for experts."""
    return {
        target.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func).endswith("ModuleList")
        for target in node.targets
        if isinstance(target, ast.Attribute) and _EXPERTS.search(target.attr)
    }


def _loops(cls: ast.ClassDef) -> list[ast.For]:
    return [node for node in ast.walk(cls) if isinstance(node, ast.For)]


def _is_routed(loop: ast.For, lists: set[str]) -> bool:
    """Return whether a loop calls an expert under a condition on tensors, or leaves others out by one."""
    names = {
        node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)
    } if _mentions(loop.iter, lists) else set()  # fmt: skip
    for number, statement in enumerate(loop.body):
        if not isinstance(statement, ast.If) or not _FROM_DATA.search(ast.unparse(statement.test)):
            continue
        leaves_out = any(isinstance(node, ast.Continue) for node in statement.body)
        called_in = loop.body[number + 1 :] if leaves_out and not statement.orelse else statement.body
        if any(_calls_expert(part, names, lists) for part in called_in):
            return not any(_calls_expert(part, names, lists) for part in statement.orelse)
    return False


def _mentions(node: ast.AST, lists: set[str]) -> bool:
    return any(isinstance(part, ast.Attribute) and part.attr in lists for part in ast.walk(node))


def _calls_expert(node: ast.AST, names: set[str], lists: set[str]) -> bool:
    for part in ast.walk(node):
        if isinstance(part, ast.Call):
            if isinstance(part.func, ast.Name) and part.func.id in names:
                return True
            if isinstance(part.func, ast.Subscript) and _mentions(part.func, lists):
                return True
    return False
