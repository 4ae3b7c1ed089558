"""Estimates of GPU memory that were made before, on disk: one file for each model, workload and machine.

What a GPU needs does not depend on the global batch, as long accumulation is like a short one: with the
estimates of one plan, that for another global batch is there at once.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.atomic_file import write_whole
from zerofit.core.cache_folder import cache_folder
from zerofit.core.estimates import MemoryEstimate

if TYPE_CHECKING:
    from zerofit.planning.problem import Problem

_PACKAGE = Path(__file__).parents[1]
_DECIDING = ("planning", "models/trace", "catalog", "core")
"""Folders of zerofit whose files, and those of the folders in them, decide an estimate."""

Estimates = dict[str, MemoryEstimate | None]
"""By strategy, in words; None for one that does not fit."""


class KeptEstimates:
    """The estimates of one problem, whatever its global batch.

    Args:
        source: what the model's trace is made of, in words.
    """

    def __init__(self, problem: Problem, source: str) -> None:
        workload = replace(problem.workload, global_batch_size=None)
        told = (
            source,
            problem.smallest_gpu,
            problem.topology,
            workload,
            problem.versions,
            problem.reserve,
            problem.makes_model_first,
            problem.loads_weights,
            problem.expandable_segments,
        )
        folder = cache_folder(os.environ, Path.home()) / "estimates"
        self._path = folder / f"{_digest(repr(told))}.json"
        self.estimates = self._read()
        self._num_read = len(self.estimates)

    def write(self) -> None:
        """Write the file if there is more than before, whole or not at all; keep none where that fails."""
        if len(self.estimates) == self._num_read:
            return
        try:
            write_whole(self._path, _adapter().dump_json(self.estimates))
        except OSError:
            return

    def _read(self) -> Estimates:
        try:
            content = self._path.read_bytes()
            return dict(_adapter().validate_json(content))
        except (OSError, ValueError):
            return {}


def _adapter() -> Any:
    from pydantic import TypeAdapter  # only where there is a file: it takes its time

    return TypeAdapter(Estimates)


def _digest(told: str) -> str:
    digest = hashlib.sha256(told.encode())
    for folder in _DECIDING:
        inside = (_PACKAGE / folder).rglob("*")
        for path in sorted(path for path in inside if path.suffix in (".py", ".toml")):
            status = path.stat()
            digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()[:40]
