"""The committed comparison of real evaluations with the plan's: one line a case."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kept_measurements import write_by_case

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kept_measurements import Measured

RESULTS = Path(__file__).parents[1] / "measured" / "evaluations.json"
LIMIT = 0.003
"""Largest difference, as a share of what the fullest rank was measured to hold."""


def compact(ranks: list[Any], estimated: int) -> dict[str, Any]:
    """Return what is kept of a case: each rank's peaks by evaluation, and the estimate."""
    real = {name: [rank["peaks"][name] for rank in ranks] for name in ranks[0]["peaks"]}
    return {"real": real, "estimated": estimated}


def differences(found: Mapping[str, Any]) -> dict[str, float]:
    """Return how far the estimate is from the fullest rank of each evaluation, as a share of that."""
    return {name: found["estimated"] / max(peaks) - 1 for name, peaks in found["real"].items()}


def write_results(measured: Measured, path: Path = RESULTS) -> None:
    """Write the comparison."""
    write_by_case(measured, path)


def read_results(path: Path = RESULTS) -> dict[str, Any]:
    """Return the committed comparison."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
