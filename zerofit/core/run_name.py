"""The names of run folders, and of the folder that holds them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime

RUNS_NAME = "zerofit-runs"
"""Default name of the folder of all run folders."""


def run_name(target: str, at: datetime) -> str:
    """Return the name of a run's folder, after the time and the script or module."""
    name = target.rstrip("/").rpartition("/")[2].removesuffix(".py")
    return f"{at:%Y-%m-%d_%H-%M-%S}-{name}"
