"""Edits: changes to a document that have exactly one right answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class SetValue:
    """Give a key this value, at a path whose parent is there; the key is added where it is missing."""

    document: str
    """The file's name, as in Document.name."""
    path: tuple[str, ...]
    value: Any
    """A scalar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenameKey:
    """Spell a key otherwise, and keep its value."""

    document: str
    path: tuple[str, ...]
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveKey:
    """Take a key and its value out."""

    document: str
    path: tuple[str, ...]


Edit: TypeAlias = SetValue | RenameKey | RemoveKey
