"""Lets DeepSpeed see model and optimizer together where a script prepares them apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerofit.runtime.changes import Changes
    from zerofit.runtime.settings import Settings


def install(accelerator_class: Any, settings: Settings, changes: Changes) -> None:
    """Hook prepare() so that what belongs together is prepared together."""
