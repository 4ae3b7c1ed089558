"""Splits the training forward pass into micro-batches, behind the script's back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerofit.runtime.changes import Changes
    from zerofit.runtime.settings import Settings


def install(accelerator_class: Any, settings: Settings, changes: Changes) -> None:
    """Hook prepare() so that the model that it returns runs in micro-batches."""
