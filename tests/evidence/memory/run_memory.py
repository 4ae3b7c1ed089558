"""Measures all cases, goes on where an earlier run was stopped, and keeps what each rank said."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memory.cases import deepspeed_config
from memory.launch import run_cases
from memory.results import Measured, compact

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memory.cases import Case

_LIBRARIES = ("torch", "deepspeed", "accelerate", "transformers")
_DECIDES = ("collectives.py", "devices.py", "models.py", "track.py", "train.py")
"""Files here that decide what is measured: a change makes earlier measurements void."""
_BATCH = 12
"""Cases that one group of ranks measures before it ends."""
_LIMIT_S = 90.0
"""For one case, on a busy machine."""


def run_memory(
    cases: Sequence[Case], folder: Path, *, anew: bool = False, tell: Callable[[str], None] = print
) -> Measured:
    """Return what the cases hold.

    Args:
        cases: what to run.
        folder: keeps measurements, so that a run that was stopped goes on, and logs.
        anew: forget earlier measurements.
        tell: takes a line for each case that could not be measured.
    """
    versions = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    kept = folder / f"memory-{_fingerprint(versions)}"
    kept.mkdir(parents=True, exist_ok=True)
    if anew:
        for path in kept.glob("*.json"):
            path.unlink()
    files = {case.key: kept / _file_name(case) for case in cases}
    missing = [case for case in cases if not files[case.key].exists()]
    for batch in _batches(missing):
        for key, ranks in run_cases(batch, folder / "logs", limit_s=60 + _LIMIT_S * len(batch)).items():
            files[key].write_text(json.dumps(ranks), encoding="utf-8")
    measured: dict[str, Any] = {}
    for case in cases:
        path = files[case.key]
        ranks = json.loads(path.read_text(encoding="utf-8")) if path.exists() else [{"raised": "did not end"}]
        if said := next((rank["raised"] for rank in ranks if "raised" in rank), None):
            tell(f"{case.key}: {said}")
            path.unlink(missing_ok=True)
        else:
            measured[case.key] = compact(case, ranks)
    machine = f"{os.cpu_count()} CPU cores ({platform.machine()}), gloo"
    date = time.strftime("%Y-%m-%d", time.gmtime())
    return Measured(versions=versions, date=date, machine=machine, cases=measured)


def _batches(cases: Sequence[Case]) -> list[list[Case]]:
    batches: list[list[Case]] = []
    for num_ranks in sorted({case.num_ranks for case in cases}):
        same = [case for case in cases if case.num_ranks == num_ranks]
        batches += [same[start : start + _BATCH] for start in range(0, len(same), _BATCH)]
    return batches


def _file_name(case: Case) -> str:
    return f"{case.key}-{_digest(case.to_json(), deepspeed_config(case))}.json"


def _fingerprint(versions: dict[str, str]) -> str:
    return _digest(
        versions, *((Path(__file__).parent / name).read_text(encoding="utf-8") for name in _DECIDES)
    )


def _digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]
