"""Specs of small models, for tests that run a rung in a separate process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from measuring.results import TrialSpec
from measuring.trial import TrialFiles

from zerofit.launching.rungs import baseline, climb, parse_rungs

BERT = {
    "model_type": "bert",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
VIT = {
    "model_type": "vit",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}


def files_in(folder: Path, name: str = "one") -> TrialFiles:
    """Return where a process leaves its files."""
    return TrialFiles(folder=folder, name=name)


def spec_in(
    folder: Path, rungs: str = "baseline", *, config: dict[str, Any] = BERT, **fields: Any
) -> TrialSpec:
    """Return the spec of a small model on the CPU, 4 samples of 16 tokens, with some fields changed."""
    (folder / "config.json").write_text(json.dumps(config))
    base = baseline(batch_size=4, sequence_length=16, attention="eager")
    run = climb(parse_rungs(rungs), base, is_cumulative=True)[-1].run
    given: dict[str, Any] = {
        "model": str(folder),
        "task": "sequence-classification",
        "strategy": run.strategy,
        "sequence_length": run.sequence_length,
        "full_length": max(base.sequence_length, run.sequence_length),
        "num_steps": 1,
        "on_cpu": True,
        **fields,
    }
    return TrialSpec(**given)
