"""Runs the matrix, goes on where an earlier run was stopped, and writes what was measured."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimizer_matrix.judge import mismatch
from optimizer_matrix.matrix import row_of
from optimizer_matrix.pair import NUM_RANKS, Pair
from optimizer_matrix.results import Results, compact

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from optimizer_matrix.cases import Case

_LIBRARIES = ("torch", "deepspeed", "accelerate", "transformers", "bitsandbytes")
_DECIDES = ("cases.py", "makers.py", "train.py", "with_trainer.py")
"""Files here that decide what is measured: a change makes earlier measurements void."""


def run_matrix(
    cases: Iterable[Case], folder: Path, *, anew: bool = False, tell: Callable[[str], None] = print
) -> Results:
    """Return what the cases come to.

    Args:
        cases: what to run.
        folder: keeps measurements, so that a run that was stopped goes on, and logs.
        anew: forget earlier measurements.
        tell: takes a line for each case that does not agree with the table.
    """
    folder.mkdir(parents=True, exist_ok=True)
    versions = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    kept = folder / f"optimizers-{_fingerprint(versions)}.jsonl"
    if anew:
        kept.unlink(missing_ok=True)
    known = _read(kept)
    has_libaio = has_async_io()
    measured: dict[str, Mapping[str, Any]] = {}
    with Pair(folder / "logs") as pair, kept.open("a", encoding="utf-8") as keep:
        for case in cases:
            if case.uses_nvme and not has_libaio:
                measured[case.key] = {"not_run": "libaio is not installed"}
                continue
            if case.key not in known:
                known[case.key] = run_case(case, pair)
                print(json.dumps({"key": case.key, **known[case.key]}), file=keep, flush=True)
            measured[case.key] = known[case.key]
            if problem := mismatch(row_of(case), measured[case.key]):
                tell(f"{case.key}: {problem}")
    machine = f"{os.cpu_count()} CPU cores ({platform.machine()}), {NUM_RANKS} ranks over gloo"
    return Results(
        versions=versions, date=time.strftime("%Y-%m-%d", time.gmtime()), machine=machine, cases=measured
    )


def run_case(case: Case, pair: Pair) -> dict[str, Any]:
    """Return what a case comes to; what does not agree with the table gets a second run, in new processes."""
    measured = pair.run(case)
    if mismatch(row_of(case), compact(measured)):
        pair.stop()
        measured = pair.run(case)
    return compact(measured)


def has_async_io() -> bool:
    """Return True if DeepSpeed's op for NVMe can be built here."""
    import contextlib
    import io

    from deepspeed.ops.op_builder import AsyncIOBuilder

    with contextlib.redirect_stdout(io.StringIO()):
        return bool(AsyncIOBuilder().is_compatible(verbose=False))


def _fingerprint(versions: Mapping[str, str]) -> str:
    sources = [(Path(__file__).parent / name).read_bytes() for name in _DECIDES]
    return hashlib.sha256(b"\0".join([json.dumps(dict(versions)).encode(), *sources])).hexdigest()[:16]


def _read(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.endswith("}"):  # a run that was stopped may leave half a line
            values = json.loads(line)
            found[values.pop("key")] = values
    return found
