"""Switches gradient checkpointing on in the model that a script prepares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerofit.runtime.changes import Changes
    from zerofit.runtime.settings import Settings


def install(accelerator_class: Any, settings: Settings, changes: Changes) -> None:
    """Hook prepare() so that the model checkpoints."""
