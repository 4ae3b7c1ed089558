"""Predictions of a rung, of the model as the rungs make it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from measuring.predict import Predictor
from measuring.results import TrialPrediction
from small_specs import BERT

from zerofit.core.facts import Versions
from zerofit.core.strategy import Buckets, Engine, Precision, ZeroStage
from zerofit.launching.rungs import LadderRun, baseline
from zerofit.machine.machine_spec import machine_of_spec
from zerofit.machine.rates import catalog_rates
from zerofit.models.find import probe_model
from zerofit.models.task import Task


@pytest.mark.slow
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
    assert predicted.parts is not None
    assert predicted.parts.gradients == 4 * model.facts.num_parameters


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    """Return a predictor of a small BERT on an A100."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(BERT))
    machine = machine_of_spec("A100-80G").machine
    return Predictor(
        model=probe_model(str(folder), task=Task.SEQUENCE_CLASSIFICATION),
        gpu=machine.gpus[0],
        versions=Versions(python="3.11", zerofit="0.1.0", torch="2.13.0", deepspeed="0.19.8"),
        machine=machine,
        rates=catalog_rates(),
    )


def _predicted(predictor: Predictor, run: LadderRun) -> TrialPrediction:
    predicted = predictor.predict(run)
    assert predicted is not None
    return predicted


_BASE = baseline(batch_size=4, sequence_length=16, attention="eager")


def _with(**changed: Any) -> LadderRun:
    return replace(_BASE, strategy=replace(_BASE.strategy, **changed))


@pytest.mark.slow
def test_weights_in_16_bit_take_half_and_are_not_cast(predictor: Predictor) -> None:
    autocast = _predicted(predictor, _with(precision=Precision.BF16))
    pure = _predicted(replace(predictor, weights=Precision.BF16), _with(precision=Precision.BF16))
    assert autocast.parts is not None
    assert pure.parts is not None
    for field in ("gradients", "optimizer_states"):
        assert getattr(pure.parts, field) == pytest.approx(getattr(autocast.parts, field) / 2, rel=0.01)
    assert (pure.parts.activations or 0) < (autocast.parts.activations or 0)


@pytest.mark.slow
def test_of_more_ranks_each_needs_no_more(predictor: Predictor) -> None:
    partitioned = _with(
        engine=Engine.DEEPSPEED,
        zero_stage=ZeroStage.OPTIMIZER_STATES,
        precision=Precision.BF16,
        buckets=Buckets(reduce_bucket_size=1000, allgather_bucket_size=1000),
    )
    by_ranks = [_predicted(replace(predictor, num_ranks=ranks), partitioned) for ranks in (1, 2, 8, 64)]
    allocated = [one.allocated_bytes or 0 for one in by_ranks]
    assert allocated == sorted(allocated, reverse=True)
    assert allocated[0] > allocated[-1]
    assert {one.parts for one in by_ranks} == {None}
    context = {(one.device_bytes or 0) - (one.reserved_bytes or 0) for one in by_ranks}
    assert len(context) == 1  # no NCCL


@pytest.mark.slow
def test_the_time_of_a_step_is_told_where_the_rates_are_known_and_nothing_is_exchanged(
    predictor: Predictor,
) -> None:
    alone = _predicted(predictor, _BASE)
    assert alone.step_time_s is not None
    assert 0 < alone.step_time_s < 1
    assert _predicted(replace(predictor, rates=None), _BASE).step_time_s is None
    assert _predicted(replace(predictor, machine=None), _BASE).step_time_s is None
    ranks = _with(engine=Engine.DEEPSPEED, zero_stage=ZeroStage.GRADIENTS, precision=Precision.BF16)
    assert _predicted(replace(predictor, num_ranks=2), ranks).step_time_s is None
