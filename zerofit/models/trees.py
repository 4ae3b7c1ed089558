"""Traversal and reconstruction of nested inputs and outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Path = tuple[Any, ...]
"""Keys and indices that lead to a leaf; () is the root."""


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield each leaf of nested mappings, lists and tuples with its path."""
    if isinstance(value, Mapping):
        for key in value:
            yield from leaves(value[key], (*path, key))
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            yield from leaves(item, (*path, place))
    else:
        yield path, value


def replaced(value: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Return the same structure with each leaf replaced."""
    if isinstance(value, Mapping):
        return mapping_like(value, {key: replaced(value[key], change, (*path, key)) for key in value})
    if isinstance(value, (list, tuple)):
        items = [replaced(item, change, (*path, place)) for place, item in enumerate(value)]
        return sequence_like(value, items)
    return change(path, value)


def mapping_like(value: Any, items: dict[Any, Any]) -> Any:
    """Return a mapping of the same class with other items.

    transformers' ModelOutput is created by its constructor, BatchEncoding and other mappings by copying.
    """
    if hasattr(value, "to_tuple"):
        return type(value)(**items)
    if type(value) is dict:
        return items
    made = copy.copy(value)
    for key, item in items.items():
        made[key] = item
    return made


def sequence_like(value: Any, items: list[Any]) -> Any:
    """Return a list, tuple or named tuple of the same class with other items."""
    if hasattr(value, "_fields"):
        return type(value)(*items)
    return items if type(value) is list else type(value)(items)
