"""Tensors in nested containers: named by their place, and put in by others."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def map_tensors(value: Any, change: Callable[[str, Any], Any], name: str = "") -> Any:
    """Return a value with every tensor in it changed; what else it holds is the same.

    Args:
        value: dicts, lists, tuples and dataclasses of tensors, or one tensor.
        change: given a tensor's name and the tensor.
        name: of the value; keys and places are joined to it by dots.
    """
    import torch

    if isinstance(value, torch.Tensor):
        return change(name, value)

    def inner(key: Any, one: Any) -> Any:
        return map_tensors(one, change, f"{name}.{key}" if name else str(key))

    if isinstance(value, UserDict):  # transformers' BatchEncoding
        changed = copy.copy(value)
        changed.data = {key: inner(key, one) for key, one in value.data.items()}
        return changed
    if isinstance(value, dict):
        return {key: inner(key, one) for key, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(inner(key, getattr(value, key)) for key in value._fields))
    if isinstance(value, (list, tuple)):
        return type(value)(inner(place, one) for place, one in enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{key: inner(key, getattr(value, key)) for key in fields})
    return value


def named_tensors(value: Any) -> list[tuple[str, Any]]:
    """Return the tensors in a value, each with its name."""
    found: list[tuple[str, Any]] = []

    def note(name: str, tensor: Any) -> Any:
        found.append((name, tensor))
        return tensor

    map_tensors(value, note)
    return found
