"""The committed comparison of real FSDP2 ranks with its trace: one line a case."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kept_measurements import write_by_case

if TYPE_CHECKING:
    from kept_measurements import Measured

RESULTS = Path(__file__).parents[1] / "measured" / "fsdp2_memory.json"
LIMIT = 0.01
"""Largest difference, as a share of what was measured."""
_DECIDES = (
    "core/upstream/fsdp2.py",
    "models/trace/fsdp2.py",
    "models/trace/recorder.py",
    "models/trace/run.py",
    "planning/estimate/engines/fsdp2.py",
)
"""zerofit's files that decide an estimate."""


def decides() -> list[str]:
    """Return the files that decide an estimate, from the root of the repository."""
    own = [f"tests/evidence/sharded/{name}.py" for name in ("estimated", "models", "cases")]
    return [*own, *(f"zerofit/{name}" for name in _DECIDES)]


def write_results(measured: Measured, path: Path = RESULTS) -> None:
    """Write the comparison."""
    write_by_case(measured, path)


def read_results(path: Path = RESULTS) -> dict[str, Any]:
    """Return the committed comparison."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
