"""The committed comparison of real FSDP2 ranks with its trace: one line a case."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kept_measurements import Measured, digest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RESULTS = Path(__file__).parents[1] / "measured" / "fsdp2_memory.json"
ROOT = Path(__file__).parents[3]
PHASES = ("rest", "forward", "backward", "step", "save")
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


def difference(case: Mapping[str, Any], phase: str) -> float:
    """Return how far the estimate of a phase is from the fullest rank, as a share of what that holds."""
    real = max(rank[phase] for rank in case["real"])
    return float(case["estimated"][phase]) / real - 1 if real else 0.0


def write_results(measured: Measured, files: Sequence[str], path: Path = RESULTS) -> None:
    """Write the comparison, and the digest of the files that decide the estimates."""
    head = {"versions": dict(measured.versions), "date": measured.date, "machine": measured.machine}
    head["estimated_by"] = digest_of(files)
    fields = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    lines = [
        f"  {json.dumps(key)}: {json.dumps(case, separators=(',', ':'))}"
        for key, case in measured.cases.items()
    ]
    body = ",\n".join([*fields, ' "cases": {\n' + ",\n".join(lines) + "\n }"])
    path.write_text("{\n" + body + "\n}\n", encoding="utf-8")


def digest_of(files: Sequence[str]) -> str:
    """Return a digest of files, named from the root of the repository."""
    return digest(*((ROOT / name).read_text(encoding="utf-8") for name in files))


def read_results(path: Path = RESULTS) -> dict[str, Any]:
    """Return the committed comparison."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def table(cases: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the comparison as a table of Markdown: peaks of the fullest rank in MiB, and differences."""
    rows = ["| run | " + " | ".join(PHASES) + " |", "|" + "---|" * (len(PHASES) + 1)]
    for key, case in cases.items():
        cells = [
            f"{max(rank[phase] for rank in case['real']) / 2**20:.1f} ({difference(case, phase):+.1%})"
            for phase in PHASES
        ]
        rows.append(f"| {key} | {' | '.join(cells)} |")
    return "\n".join(rows)
