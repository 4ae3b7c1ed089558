"""Measurements of many cases, stored as they are made, so that a stopped run can continue."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_LIBRARIES = ("torch", "deepspeed", "accelerate", "transformers", "bitsandbytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured of each case, and where."""

    versions: Mapping[str, str]
    date: str
    """Day of the last measurement, as 2026-01-31."""
    machine: str
    """Kind of the machine."""
    cases: Mapping[str, Mapping[str, Any]]
    """By the cases' keys."""


def measured_here(cases: Mapping[str, Mapping[str, Any]]) -> Measured:
    """Return measurements with the versions, the day and the machine of this run."""
    machine = f"{os.cpu_count()} CPU cores ({platform.machine()}), gloo"
    date = time.strftime("%Y-%m-%d", time.gmtime())
    return Measured(versions=_versions(), date=date, machine=machine, cases=cases)


class KeptAnswers:
    """The answers so far to cases by their keys, in a file: of these versions and of these sources alone.

    Args:
        file: how the file's name begins.
        folder: of the sources.
        sources: names of what decides the measurements: a change makes earlier ones void.
        anew: forget earlier ones.
    """

    def __init__(self, file: Path, folder: Path, sources: Sequence[str], *, anew: bool) -> None:
        texts = ((folder / source).read_text(encoding="utf-8") for source in sources)
        decides = digest(_versions(), *texts)
        self._file = file.with_name(f"{file.name}-{decides}.jsonl")
        self._file.parent.mkdir(parents=True, exist_ok=True)
        if anew:
            self._file.unlink(missing_ok=True)
        lines = self._file.read_text(encoding="utf-8").splitlines() if self._file.exists() else []
        # A run that was stopped may leave half a line.
        self.known: dict[str, Any] = dict(json.loads(line) for line in lines if line.endswith("]"))

    def keep(self, key: str, answer: Any) -> None:
        """Keep one more answer."""
        self.known[key] = answer
        with self._file.open("a", encoding="utf-8") as file:
            print(json.dumps([key, answer]), file=file)


def digest(*values: Any) -> str:
    """Return a name for values of JSON."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in _LIBRARIES}


def write_by_case(measured: Measured, path: Path) -> None:
    """Write measurements as JSON, a line each case."""
    head = {"versions": dict(measured.versions), "date": measured.date, "machine": measured.machine}
    fields = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    lines = [
        f"  {json.dumps(key)}: {json.dumps(case, separators=(',', ':'))}"
        for key, case in measured.cases.items()
    ]
    body = ",\n".join([*fields, ' "cases": {\n' + ",\n".join(lines) + "\n }"])
    path.write_text("{\n" + body + "\n}\n", encoding="utf-8")
