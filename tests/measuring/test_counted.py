"""What is counted of a rung, under DeepSpeed and on a GPU, and what of it is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_specs import place_in, spec_in

from zerofit.core.strategy import Engine, Precision, ZeroStage
from zerofit.measuring.measure import num_trained, peak_on_device
from zerofit.measuring.parent import run_rung
from zerofit.measuring.results import RungState
from zerofit.models.find import probe_model
from zerofit.models.task import Task


@pytest.mark.evidence
@pytest.mark.timeout(1800)
def test_under_zero_3_parameters_count_whole_and_tensors_do_not(tmp_path: Path) -> None:
    spec = spec_in(tmp_path, num_ranks=2)
    strategy = replace(
        spec.strategy, engine=Engine.DEEPSPEED, zero_stage=ZeroStage.PARAMETERS, precision=Precision.BF16
    )
    outcome = run_rung(
        replace(spec, strategy=strategy), place_in(tmp_path), limit_s=1700
    )  # an op of DeepSpeed may have to compile
    assert outcome.state is RungState.DONE, outcome
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
