"""Tensors in nested containers: named by their path, and replaced."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors in a value, each with its name.

    Args:
        value: mappings, lists, tuples and dataclasses of tensors, or one tensor.
        name: of the value; keys and indices are joined to it by dots.
    """
    import torch

    if isinstance(value, torch.Tensor):
        yield name, value
    for key, inner in _inside(value):
        yield from named_tensors(inner, _joined(name, key))


def map_tensors(value: Any, change: Callable[[str, Any], Any], name: str = "") -> Any:
    """Return a value with every tensor in it replaced, and everything else unchanged.

    Args:
        value: mappings, lists, tuples and dataclasses of tensors, or one tensor.
        change: called with a tensor's name and the tensor.
        name: of the value; keys and indices are joined to it by dots.
    """
    import torch

    if isinstance(value, torch.Tensor):
        return change(name, value)
    changed = {key: map_tensors(inner, change, _joined(name, key)) for key, inner in _inside(value)}
    if isinstance(value, UserDict):  # transformers' BatchEncoding
        made = copy.copy(value)
        made.data = changed
        return made
    if isinstance(value, Mapping):
        return changed
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*changed.values())
    if isinstance(value, (list, tuple)):
        return type(value)(changed.values())
    return dataclasses.replace(value, **changed) if changed else value


def _inside(value: Any) -> list[tuple[Any, Any]]:
    """Return a container's items with their keys or indices; empty for any other value."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(key, getattr(value, key)) for key in value._fields]
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value) if field.init]
    return []


def _joined(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)
