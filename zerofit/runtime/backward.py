"""Accelerator.backward under a plan: in pieces, and under DeepSpeed when the script's own step is known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerofit.runtime.changes import Changes
    from zerofit.runtime.settings import Settings


def install(accelerator_class: Any, settings: Settings, changes: Changes) -> None:
    """Hook backward() and accumulate()."""
