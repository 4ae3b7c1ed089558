"""The committed measurements: one line a case, with the versions, the day and the machine."""

from __future__ import annotations

import json
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kept_measurements import Measured

if TYPE_CHECKING:
    from collections.abc import Mapping

RESULTS = Path(__file__).parents[1] / "measured" / "optimizers.json"


UNBOUNDED = 1e6
"""The error of weights that are not finite any more, which JSON has no number for."""


def read_results(path: Path = RESULTS) -> Measured:
    """Return the committed measurements."""
    return Measured(**json.loads(path.read_text(encoding="utf-8")))


def write_results(results: Measured, path: Path = RESULTS) -> None:
    """Write measurements, one line a case, sorted, so that differences read well."""
    lines = [f"    {json.dumps(key)}: {json.dumps(results.cases[key])}" for key in sorted(results.cases)]
    head = {"versions": dict(results.versions), "date": results.date, "machine": results.machine}
    top = json.dumps(head, indent=2).removesuffix("\n}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{top},\n  "cases": {{\n' + ",\n".join(lines) + "\n  }\n}\n", encoding="utf-8")


def compact(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return a measurement as it is written: errors to two digits, texts cut."""
    if "raised" in measured:
        return {"raised": measured["raised"][:120]}
    if "error" in measured:
        error = measured["error"] if isfinite(measured["error"]) else UNBOUNDED
        return {**measured, "error": float(f"{error:.2g}")}
    return dict(measured)
