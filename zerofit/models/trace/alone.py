"""Traces a named model under FSDP2 in a process of its own.

After a run of FSDP2 on fake tensors the process's heap may be corrupt (torch 2.13: a later garbage collection
ends in a segmentation fault), so that no process makes two of them.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.core.errors import UserError
from zerofit.core.module_path import OWN_PROGRAM
from zerofit.models.trace.cache import read_trace

if TYPE_CHECKING:
    from zerofit.core.allocation_log import Trace, TraceRequest
    from zerofit.models.source import ModelSource

_PROGRAM = "zerofit.models.trace.alone_process"
_ATTEMPTS = 2


def trace_alone(source: ModelSource, request: TraceRequest) -> Trace:
    """Return the trace of a model, made by another process.

    Raises:
        UserError: the model can't be traced.
    """
    asked = pickle.dumps((source, request))
    package = str(Path(__file__).parents[3])
    paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "asked.trace"
        for _ in range(_ATTEMPTS):
            ended = subprocess.run(
                [*OWN_PROGRAM, _PROGRAM, str(file)],
                input=asked,
                capture_output=True,
                env={**os.environ, "PYTHONPATH": paths},
                check=False,
            )
            if (said := _refusal(file)) is not None:
                raise said
            if (trace := read_trace(file, request)) is not None:
                return trace
    lines = ended.stderr.decode(errors="replace").strip().splitlines()
    raise UserError(
        "trace-failed",
        "the model can't be traced under FSDP2",
        found=f"the tracing process ended with {ended.returncode}: {(lines or ['no message'])[-1][:200]}",
        why="what FSDP2 allocates is known by running it on tensors without values",
        fix="plan with ZeRO: --engine deepspeed",
    )


def _refusal(file: Path) -> UserError | None:
    error = file.with_suffix(".json")
    if not error.exists():
        return None
    fields = json.loads(error.read_text("utf-8"))
    return UserError(fields.pop("id"), fields.pop("summary"), **fields)
