"""What is predicted of a rung, of the model as the rungs make it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zerofit.facts import Versions
from zerofit.ladder.predict import Predictor
from zerofit.ladder.rungs import baseline
from zerofit.probe.model import probe_model
from zerofit.probe.model_task import Task


def test_a_decoder_with_a_classifying_head_is_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = {
        "model_type": "gpt2",
        "vocab_size": 100,
        "n_positions": 32,
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = probe_model(str(tmp_path), task=Task.SEQUENCE_CLASSIFICATION)
    versions = Versions(python="3.11", zerofit="0.1.0", torch="2.13.0")
    run = baseline(batch_size=2, sequence_length=8, attention="eager")
    predicted = Predictor(model=model, gpu=None, versions=versions).predict(run)
    assert predicted is not None
    assert predicted.parts.gradients == 4 * model.facts.num_parameters
