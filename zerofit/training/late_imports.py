"""Functions that modules imported from each other before hooks replaced them."""

from __future__ import annotations

import sys
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def imported_functions(modules: Iterable[str]) -> dict[str, dict[str, FunctionType]]:
    """Return the functions of those modules that are already imported, by module and name."""
    return {
        name: {key: value for key, value in vars(sys.modules[name]).items() if type(value) is FunctionType}
        for name in dict.fromkeys(modules)
        if name in sys.modules
    }


def replace_imported_copies(before: Mapping[str, Mapping[str, FunctionType]]) -> None:
    """Replace hooked functions wherever another module has imported them by name.

    `from torch.nn.utils import clip_grad_norm_` above the line with the hooks would leave the script with the
    unhooked function. Only functions that the hooked module defines, or one of its submodules, are replaced:
    a hook on a function that it has imported itself is for that module alone.

    Args:
        before: `imported_functions()` from before the hooks.
    """
    replaced: dict[int, tuple[Any, Any]] = {}
    for name, functions in before.items():
        for key, old in functions.items():
            new = getattr(sys.modules[name], key, old)
            if new is not old and f"{old.__module__}.".startswith(f"{name}."):
                replaced[id(old)] = old, new
    for module in list(sys.modules.values()):
        for key, value in list(getattr(module, "__dict__", {}).items()):
            old, new = replaced.get(id(value), (None, None))
            if old is not None and value is old:
                setattr(module, key, new)
