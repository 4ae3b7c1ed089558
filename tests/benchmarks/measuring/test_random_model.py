"""The model that every rung trains: number formats of the weights, and images in place of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from measuring.predict import Predictor
from measuring.random_model import make_model, make_samples
from measuring.results import TrialState
from measuring.trial import run_trial
from small_specs import VIT, files_in, spec_in

from zerofit.core.facts import Versions
from zerofit.core.strategy import Precision
from zerofit.launching.rungs import LadderRun
from zerofit.models.find import probe_model
from zerofit.models.task import Task

_IMAGES = {"task": "image-classification", "sequence_length": 1, "full_length": 1}


@pytest.mark.parametrize(
    ("weights", "dtype"),
    [(Precision.FP32, torch.float32), (Precision.BF16, torch.bfloat16), (Precision.FP16, torch.float16)],
)
def test_a_model_is_made_in_the_format_of_its_weights(
    tmp_path: Path, weights: Precision, dtype: torch.dtype
) -> None:
    model = make_model(spec_in(tmp_path, weights=weights), "cpu")
    assert {one.dtype for one in model.parameters()} == {dtype}


def test_images_are_noise_with_a_class_each(tmp_path: Path) -> None:
    spec = spec_in(tmp_path, config=VIT, **_IMAGES)
    samples = make_samples(make_model(spec, "cpu"), spec)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in samples.items()} == {
        "pixel_values": ((4, 3, 32, 32), torch.float32),
        "labels": ((4,), torch.int64),
    }
    assert samples["pixel_values"].std().item() == pytest.approx(1, abs=0.05)
    assert set(samples["labels"].tolist()) <= {0, 1}


def test_tokens_and_labels_are_those_of_ladders_before(tmp_path: Path) -> None:
    spec = spec_in(tmp_path, "length-8", full_length=16)
    samples = make_samples(make_model(spec, "cpu"), spec)
    random = torch.Generator().manual_seed(42)
    assert samples["input_ids"].equal(torch.randint(1, 100, (4, 16), generator=random)[:, :8])
    assert samples["labels"].equal(torch.randint(0, 2, (4,), generator=random))


@pytest.mark.slow
def test_a_model_of_images_in_bf16_trains_and_is_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    spec = spec_in(tmp_path, "bf16", config=VIT, weights=Precision.BF16, **_IMAGES)
    outcome = run_trial(spec, files_in(tmp_path), limit_s=200)
    assert outcome.state is TrialState.DONE, outcome
    measured = outcome.measured
    assert measured is not None
    assert measured.counted is not None
    model = probe_model(str(tmp_path), task=Task.IMAGE_CLASSIFICATION)
    versions = Versions(python="3.11", zerofit="0.1.0", torch=torch.__version__)
    run = LadderRun(strategy=spec.strategy, sequence_length=1)
    predictor = Predictor(model=model, gpu=None, versions=versions, weights=Precision.BF16)
    predicted = predictor.predict(run)
    assert predicted is not None
    assert predicted.parts is not None
    assert measured.counted.weights == predicted.parts.weights == 2 * model.facts.num_parameters
    assert measured.counted.gradients == predicted.parts.gradients
    assert measured.num_trained_parameters == model.facts.num_parameters


@pytest.mark.parametrize(("rungs", "place"), [("zero-1", "cpu"), ("zero-2", "cpu"), ("baseline", "meta")])
def test_a_model_is_made_where_it_trains_but_for_deepspeed_below_stage_3(
    tmp_path: Path, rungs: str, place: str
) -> None:
    model = make_model(spec_in(tmp_path, rungs), "meta")
    assert {one.device.type for one in model.parameters()} == {place}
