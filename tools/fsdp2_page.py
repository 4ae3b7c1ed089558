"""The page that compares what real FSDP2 holds on CPU ranks with what its trace says."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

PHASES = ("rest", "forward", "backward", "step", "save")
BY_TORCH = "FSDPMemTracker"
"""The peak that torch's own tracker tells, beside the estimated phases."""
_HEAD = """\
<!-- Written by `make docs` from tests/evidence/measured/fsdp2_memory.json. -->
# Memory under FSDP2

Small models of transformers were trained by accelerate under FSDP2 on 2 and 4 CPU ranks, and their live
tensors followed. Beside each peak is how far the plan's trace is from it: FSDP2 itself, run on fake tensors
as rank 0. The last column is torch's own `FSDPMemTracker`, against the peak of a step; it fails for some
models, and counts the host's memory under offload. Measured by `benchmarks/fsdp2_memory.py` on {date} with
torch {torch}, accelerate {accelerate} and transformers {transformers}.

In a run's name: `no`, `bf16` or `fp16` is the mixed precision, `n4` four ranks, `kept` without resharding
after the forward pass, `x4` four micro-batches in a step, `copies2` hybrid sharding with two copies,
`bfloat16` a model loaded in that format. "Rest" is before the first step, "save" a full state dict. Peaks are
in MiB.

"""


def fsdp2_page(measured: Mapping[str, Any]) -> str:
    """Return the page.

    Args:
        measured: the versions, the date, and each case with the peaks of real ranks and the estimate.
    """
    return f"{_HEAD.format(date=measured['date'], **measured['versions'])}{fsdp2_table(measured['cases'])}\n"


def fsdp2_table(cases: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the comparison as a table of Markdown."""
    rows = ["| run | " + " | ".join((*PHASES, BY_TORCH)) + " |", "|" + "---|" * (len(PHASES) + 2)]
    for key, case in cases.items():
        cells = [f"{held(case, phase) / 2**20:.1f} ({difference(case, phase):+.1%})" for phase in PHASES]
        told = case["estimated"].get(BY_TORCH)
        cells.append("-" if told is None else f"{told / peak_of_steps(case) - 1:+.1%}")
        rows.append(f"| {key} | {' | '.join(cells)} |")
    return "\n".join(rows)


def difference(case: Mapping[str, Any], phase: str) -> float:
    """Return how far the estimate of a phase is from what the ranks hold, as a share of that."""
    real = held(case, phase)
    return float(case["estimated"][phase]) / real - 1 if real else 0.0


def held(case: Mapping[str, Any], phase: str) -> int:
    """Return what a rank in the middle holds: on others Python's garbage collector may run later."""
    return int(statistics.median_low(rank[phase] for rank in case["real"]))


def peak_of_steps(case: Mapping[str, Any]) -> int:
    """Return the most that a real rank holds in a step."""
    return max(held(case, phase) for phase in ("forward", "backward", "step"))
