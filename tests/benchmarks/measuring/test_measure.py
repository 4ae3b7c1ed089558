"""The training loop of all trials, and what is counted of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from measuring.measure import make_trainee, num_trained, peak_on_device
from measuring.memory import gradient_bytes, state_bytes, weight_bytes
from measuring.random_model import make_model, make_samples, without_dropout
from measuring.results import TrialState
from measuring.training_loop import Trainee
from measuring.trial import run_trial
from measuring.trial_program import check_can_run
from refusals import refusal
from small_specs import files_in, spec_in

from zerofit.core.strategy import Engine, Precision, ZeroStage
from zerofit.models.find import probe_model
from zerofit.models.task import Task


def _trainee(folder: Path, rungs: str) -> Trainee:
    spec = spec_in(folder, rungs)
    model = make_model(spec, "cpu")
    return make_trainee(model, make_samples(model, spec), spec, "cpu")


def _losses(trainee: Trainee) -> list[float]:
    with without_dropout(trainee.model):
        return [trainee.step() for _ in range(3)]


@pytest.mark.parametrize("rungs", ["accumulation", "micro-batch-2", "checkpointing", "micro-batch-2,sdpa"])
def test_what_does_not_change_the_mathematics_has_the_same_losses(tmp_path: Path, rungs: str) -> None:
    whole = _losses(_trainee(tmp_path, "baseline"))
    assert _losses(_trainee(tmp_path, rungs)) == pytest.approx(whole, rel=1e-6)
    assert whole[0] > whole[1] > whole[2]


@pytest.mark.parametrize("rungs", ["sgd", "freeze-blocks", "length-8"])
def test_what_changes_the_training_has_other_losses(tmp_path: Path, rungs: str) -> None:
    whole = _losses(_trainee(tmp_path, "baseline"))
    assert _losses(_trainee(tmp_path, rungs)) != pytest.approx(whole, rel=1e-6)


def test_a_shorter_rung_has_the_same_samples_cut_off(tmp_path: Path) -> None:
    long, short = (_trainee(tmp_path, rungs).samples for rungs in ("baseline", "length-8"))
    assert short["input_ids"].equal(long["input_ids"][:, :8])
    assert short["labels"].equal(long["labels"])
    assert short["attention_mask"].tolist() == [[1] * 7 + [0]] * 4


def test_dropout_is_off_for_a_while_only(tmp_path: Path) -> None:
    trainee = _trainee(tmp_path, "baseline")
    batch = {name: tensor[:2] for name, tensor in trainee.samples.items()}
    with without_dropout(trainee.model):
        assert trainee.forward(batch).item() == trainee.forward(batch).item()
    assert trainee.forward(batch).item() != trainee.forward(batch).item()
    assert trainee.model.training


def test_bytes_are_those_of_the_tensors(tmp_path: Path) -> None:
    trainee = _trainee(tmp_path, "baseline")
    num_parameters = sum(one.numel() for one in trainee.model.parameters())
    num_buffers = sum(one.nbytes for one in trainee.model.buffers())
    trainee.backward()
    assert weight_bytes(trainee.model) == 4 * num_parameters + num_buffers
    assert gradient_bytes(trainee.model) == 4 * num_parameters
    trainee.update()
    steps = 4 * len(list(trainee.model.parameters()))
    assert state_bytes(trainee.optimizer) == 8 * num_parameters + steps
    assert gradient_bytes(trainee.model) == 0


@pytest.mark.parametrize(
    ("rungs", "summary"),
    [
        ("tf32", "tf32 needs a GPU that supports it"),
        ("paged-adamw-8bit", "paged-adamw-8bit needs a GPU"),
    ],
)
def test_what_this_machine_lacks_is_said(tmp_path: Path, rungs: str, summary: str) -> None:
    assert refusal(check_can_run, spec_in(tmp_path, rungs)).summary == summary


@pytest.mark.evidence
@pytest.mark.timeout(1800)
def test_under_zero_3_parameters_count_whole_and_tensors_do_not(tmp_path: Path) -> None:
    spec = spec_in(tmp_path, num_ranks=2)
    strategy = replace(
        spec.strategy, engine=Engine.DEEPSPEED, zero_stage=ZeroStage.PARAMETERS, precision=Precision.BF16
    )
    outcome = run_trial(
        replace(spec, strategy=strategy), files_in(tmp_path), limit_s=1700
    )  # an op of DeepSpeed may have to compile
    assert outcome.state is TrialState.DONE, outcome
    assert outcome.measured is not None
    assert outcome.measured.counted is None
    model = probe_model(str(tmp_path), task=Task.SEQUENCE_CLASSIFICATION)
    assert outcome.measured.num_trained_parameters == model.facts.num_parameters


def test_a_partition_counts_as_its_whole_parameter_and_a_frozen_one_not_at_all() -> None:
    layer = torch.nn.Linear(4, 2)
    layer.weight.ds_numel = (
        layer.weight.numel()
    )  # as deepspeed/runtime/zero/partition_parameters.py leaves it
    layer.weight.data = torch.empty(0)
    layer.bias.requires_grad_(requires_grad=False)
    assert num_trained(layer) == 8


@pytest.mark.parametrize(
    ("held", "reserved", "most_reserved", "expected"),
    [
        (2500, 2000, 2000, 2500),  # nothing was given back
        (1500, 1000, 2000, 2500),  # 1000 were, and 500 are beside torch's memory
        (500, 0, 2000, 2500),
        (None, 1000, 2000, None),
    ],
)
def test_memory_that_torch_gave_back_counts_at_its_peak_on_the_device(
    held: int | None, reserved: int, most_reserved: int, expected: int | None
) -> None:
    assert peak_on_device(held, reserved_bytes=reserved, most_reserved_bytes=most_reserved) == expected
