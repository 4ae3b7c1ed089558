"""The published ladder of strategies on chinese-macbert-large, predicted: python benchmarks/ladder.py

24 layers, hidden 1024, sequence classification, batch 32, length 128, fp32 AdamW; memory as its author
measured it. Neither GPU nor versions are stated, nor whether "G" is GiB or GB; it is read as GiB. Writes
measured/ladder.json.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerofit.estimate.engine import Setup
from zerofit.estimate.memory import estimate_memory
from zerofit.facts import Versions, Workload
from zerofit.plan import Topology
from zerofit.planning.trace_request import trace_request_for
from zerofit.probe.gpu_catalog import find_gpu
from zerofit.probe.model import probe_model
from zerofit.probe.model_task import Task
from zerofit.probe.trace.cache import default_cache_folder
from zerofit.probe.trace.source import trace_model
from zerofit.strategy import OptimizerName, Precision, Strategy
from zerofit.units import GIB

_GPU = "V100-32G"
"""ASSUMPTION: a card of the time with enough memory; it decides the attention kernel."""
_VERSIONS = Versions(python="3", zerofit="0", torch="1.10")
"""ASSUMPTION: the PyTorch of the time, which decides the CUDA context's size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One row of the ladder."""

    name: str
    strategy: Strategy
    sequence_length: int
    measured_g: float
    """As printed, in "G"."""


def rungs() -> tuple[Rung, ...]:
    """Return the ladder, each rung on top of the one before."""
    baseline = Strategy(precision=Precision.FP32, micro_batch_size=32, attention="eager")
    accumulation = replace(baseline, micro_batch_size=1, gradient_accumulation_steps=32)
    checkpointing = replace(accumulation, gradient_checkpointing=True)
    adafactor = replace(checkpointing, optimizer=OptimizerName.ADAFACTOR)
    frozen = replace(adafactor, freeze=("bert.encoder.*",))
    return tuple(
        Rung(name=name, strategy=strategy, sequence_length=length, measured_g=measured)
        for name, strategy, length, measured in (
            ("baseline", baseline, 128, 15.1),
            ("+ accumulation, 1 x 32", accumulation, 128, 7.5),
            ("+ gradient checkpointing", checkpointing, 128, 7.3),
            ("+ Adafactor", adafactor, 128, 5.5),
            ("+ frozen encoder", frozen, 128, 3.5),
            ("+ length 64", frozen, 64, 3.4),
        )
    )


def main() -> None:
    """Print each rung with its terms, and write them down."""
    table = [predict(rung) for rung in rungs()]
    for row in table:
        terms = ", ".join(f"{name} {gib}" for name, gib in row["terms"].items())
        print(
            f"{row['rung']:26} {row['measured_g']:5} G {row['predicted_gib']:6} GiB "
            f"{row['error']:+.1%}  {terms}"
        )
    text = json.dumps(table, indent=1) + "\n"
    (Path(__file__).parent / "measured" / "ladder.json").write_text(text, encoding="utf-8")


def predict(rung: Rung) -> dict[str, Any]:
    """Return one rung's prediction beside what was measured."""
    gpu = find_gpu(_GPU)
    model = probe_model("chinese-macbert-large", task=Task.SEQUENCE_CLASSIFICATION)
    workload = Workload(sequence_length=rung.sequence_length, is_padded=True, keeps_outputs=True)
    request = trace_request_for(rung.strategy, workload, gpu)
    trace = trace_model(model, request, cache_folder=default_cache_folder(os.environ, Path.home()))
    setup = Setup(
        log=trace.log_for(rung.strategy.micro_batch_size or 1),
        strategy=rung.strategy,
        topology=Topology(),
        versions=_VERSIONS,
        keeps_outputs=True,
    )
    peak = estimate_memory(setup, gpu=gpu).peak
    return {
        "rung": rung.name,
        "measured_g": rung.measured_g,
        "predicted_gib": round(peak.total_bytes / GIB, 2),
        "error": round(peak.total_bytes / GIB / rung.measured_g - 1, 3),
        "phase": peak.phase.value,
        "terms": {
            term.name: round(term.num_bytes / GIB, 2) for term in peak.terms if term.num_bytes > GIB / 100
        },
    }


if __name__ == "__main__":
    main()
