"""The published ladder of strategies on chinese-macbert-large, predicted.

24 layers, hidden 1024, sequence classification, batch 32, length 128, fp32 AdamW; memory as its author
measured it. Neither GPU nor versions are stated, nor whether "G" is GiB or GB; it is read as GiB.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring.ladder import (
    PUBLISHED_BATCH,
    PUBLISHED_LENGTH,
    PUBLISHED_MODEL,
    published_of,
)
from measuring.predict import Predictor

from zerofit.core.facts import Versions
from zerofit.core.units import GIB
from zerofit.launching.rungs import ON_ONE_RANK, LadderRun, baseline, climb, parse_rungs
from zerofit.machine.gpu_catalog import find_gpu
from zerofit.models.find import probe_model
from zerofit.models.task import Task

OUT = Path(__file__).parent / "measured" / "ladder.json"
_GPU = "V100-32G"
"""ASSUMPTION: a card of the time with enough memory; it decides the attention kernel."""
_VERSIONS = Versions(python="3", zerofit="0", torch="1.10")
"""ASSUMPTION: the PyTorch of the time, which decides the CUDA context's size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRung:
    """One rung of the published ladder."""

    name: str
    run: LadderRun
    measured_g: float
    """As printed, in "G"."""


def rows() -> tuple[PublishedRung, ...]:
    """Return the ladder, each rung on top of the one before."""
    base = baseline(batch_size=PUBLISHED_BATCH, sequence_length=PUBLISHED_LENGTH, attention="eager")
    steps = climb(parse_rungs(ON_ONE_RANK), base, is_cumulative=True)
    published = [(step, published_of(PUBLISHED_MODEL, base, step.run)) for step in steps]
    return tuple(
        PublishedRung(name=step.label, run=step.run, measured_g=figures.memory_g)
        for step, figures in published
        if figures is not None
    )


def main() -> None:
    """Print each rung with its terms, and write them down."""
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=keep_lines)
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help=f"default: {OUT.name}")
    out = parser.parse_args().out
    model = probe_model(PUBLISHED_MODEL, task=Task.SEQUENCE_CLASSIFICATION)
    predictor = Predictor(model=model, gpu=find_gpu(_GPU), versions=_VERSIONS, keeps_outputs=True)
    table = [predict(predictor, row) for row in rows()]
    for row in table:
        terms = ", ".join(f"{name} {gib}" for name, gib in row["terms"].items())
        print(
            f"{row['rung']:26} {row['measured_g']:5} G {row['predicted_gib']:6} GiB "
            f"{row['error']:+.1%}  {terms}"
        )
    text = json.dumps(table, indent=1) + "\n"
    out.write_text(text, encoding="utf-8")


def predict(predictor: Predictor, row: PublishedRung) -> dict[str, Any]:
    """Return one rung's prediction beside what was measured."""
    peak = predictor.estimate(row.run).peak
    return {
        "rung": row.name,
        "measured_g": row.measured_g,
        "predicted_gib": round(peak.total_bytes / GIB, 2),
        "error": round(peak.total_bytes / GIB / row.measured_g - 1, 3),
        "phase": peak.phase.value,
        "terms": {
            term.name: round(term.num_bytes / GIB, 2) for term in peak.terms if term.num_bytes > GIB / 100
        },
    }


if __name__ == "__main__":
    main()
