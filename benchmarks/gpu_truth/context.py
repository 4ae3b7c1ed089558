"""What a process holds of the GPU beside its tensors: starts the program that measures it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_truth.results import ContextMeasured

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAM = (sys.executable, "-P", str(Path(__file__).with_name("context_program.py")))
"""-P keeps the program's folder off sys.path, where modules of ours would hide others of the same name."""


def measure_context(
    *, limit_s: float, tell: Callable[[str], None], program: tuple[str, ...] = PROGRAM
) -> ContextMeasured | None:
    """Return what a process of its own measured, or None where there is no GPU.

    A program that fails, or does not end in time, gives None too: the rest of the harness goes on.

    Args:
        limit_s: after so many seconds the program is ended.
        tell: told why there is nothing, where there is a GPU.
        program: the program that measures.
    """
    try:
        ended = subprocess.run(
            program,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env=_environment(),
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        tell(f"the CUDA context was not measured: its program did not end within {limit_s:g} s")
        return None
    if ended.returncode != 0:
        last_line = (ended.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        tell(f"the CUDA context was not measured: its program ended with {ended.returncode}: {last_line}")
        return None
    found = json.loads(ended.stdout)
    return None if found is None else ContextMeasured(**found)


def _environment() -> dict[str, str]:
    """Return the environment of the program: the zerofit beside these benchmarks, installed or not."""
    places = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
