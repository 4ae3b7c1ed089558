"""Pin: one field of a strategy that a captured script leaves only some values, with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

_SHOWN = 3
"""Names that a reason lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """One field of a strategy and the values that it can have."""

    field: str
    """Name of the Strategy field."""
    values: tuple[Any, ...]
    """The first one is the script's own."""
    why: str
    """One phrase."""
    is_habit: bool = False
    """Whether a flag of the user's may say otherwise: it is the script's choice, and no limit of it."""


def listed(names: Sequence[str]) -> str:
    """Return the first few names, and how many more there are."""
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
