"""Trains tests/semantics/scripts/edits.py by itself and under zerofit, and measures how far apart they
end."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from runs import ROOT, Run, run_command, stock_launcher

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = ROOT / "tests" / "semantics" / "scripts" / "edits.py"
LAYOUTS = {
    "split": ("--num-processes", "1", "--micro-batch-size", "4"),
    "ddp": ("--num-processes", "2", "--engine", "native"),
    "fsdp2": ("--num-processes", "2", "--engine", "fsdp2"),
    "z1": ("--num-processes", "2", "--zero-stage", "1", "--offload-optimizer", "none"),
    "z2": ("--num-processes", "2", "--zero-stage", "2", "--offload-optimizer", "none"),
    "z3": ("--num-processes", "2", "--zero-stage", "3", "--offload-optimizer", "none"),
    "z3-sharded": ("--num-processes", "2", "--zero-stage", "3", "--offload-optimizer", "none"),
    "z3-offload": ("--num-processes", "2", "--zero-stage", "3", "--offload-optimizer", "cpu"),
}
"""Flags of `zerofit launch` for each layout of ranks; "split" is one process with halved batches.
ZeRO-3 keeps small weights whole; in "z3-sharded" one is not."""
SAMPLES = 8
"""Samples in a step, over all ranks."""
_REFUSAL = re.compile(r"error\[([a-z0-9-]+)\]")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a training under zerofit ended."""

    refused: str = ""
    """The id of the error that ended it."""
    distance: float = 0.0
    """Between the final weights of both, relative to the way that training took; 2-norms."""


def train_by_itself(
    edit: str, folder: Path, *, precision: str, num_ranks: int, is_wide: bool = False
) -> Path:
    """Run the script by the stock `accelerate launch`, and return the folder of what it left."""
    ranks = "--multi_gpu" if num_ranks > 1 else "--cpu"
    flags = f"{ranks} --num_processes={num_ranks} --num_machines=1 --dynamo_backend=no"
    launcher = (*stock_launcher(), *flags.split())
    arguments = _arguments(edit, num_ranks, is_wide)
    command = (*launcher, f"--mixed_precision={precision}", str(SCRIPT), *arguments)
    run_command(command, folder, ACCELERATE_USE_CPU="true").check()
    return folder / "out"


def train_under_zerofit(edit: str, layout: str, folder: Path, *, precision: str) -> Run:
    """Run the script by `zerofit launch`."""
    launcher = (sys.executable, "-m", "zerofit", "launch", "--cpu", "--mixed-precision", precision)
    num_ranks = int(LAYOUTS[layout][1])
    arguments = _arguments(edit, num_ranks, layout == "z3-sharded")
    return run_command((*launcher, *LAYOUTS[layout], str(SCRIPT), *arguments), folder)


def outcome_of(run: Run, alone: Path) -> Outcome:
    """Return how a run ended, compared with the script by itself.

    Args:
        run: of train_under_zerofit().
        alone: what train_by_itself() returned.
    """
    if run.exit_code:
        found = _REFUSAL.search(run.stderr)
        assert found, run.stderr
        return Outcome(refused=found[1])
    import torch

    start, end, other = (
        _weights(file)
        for file in (
            alone / "start.safetensors",
            alone / "end.safetensors",
            run.folder / "out" / "end.safetensors",
        )
    )
    names = sorted(start.keys() & end.keys() & other.keys())
    way, apart = (
        torch.cat([(one[name] - two[name]).flatten() for name in names]).norm()
        for one, two in ((end, start), (end, other))
    )
    return Outcome(distance=float(apart / way))


@cache
def _weights(file: Path) -> dict[str, object]:
    from safetensors.torch import load_file

    return load_file(file)


def _arguments(edit: str, num_ranks: int, is_wide: bool) -> tuple[str, ...]:
    more = (*(("--find-unused",) if num_ranks > 1 else ()), *(("--wide",) if is_wide else ()))
    return ("--edit", edit, "--batch-size", str(SAMPLES // num_ranks), *more)
