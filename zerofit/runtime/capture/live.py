"""Live: the very model and batch that a captured script would train with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerofit.capture import Capture
    from zerofit.command import Route


@dataclass(slots=True, kw_only=True)
class Live:
    """What a capture leaves for tracing, in the captured process."""

    model: Any
    """The nn.Module that the script trains, unwrapped, on meta or with its weights."""
    batch: tuple[tuple[Any, ...], dict[str, Any]]
    """Arguments of the first forward pass in training: positional ones and those by name."""
    route: Route
    capture: Capture
