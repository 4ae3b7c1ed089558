"""Which trace a strategy needs."""

from __future__ import annotations

from typing import Any

import pytest

from zerofit.core.allocation_log import Packing
from zerofit.core.facts import GpuSpec, Workload
from zerofit.core.strategy import Engine, Lora, Precision, Quantization, Strategy, ZeroStage
from zerofit.planning.estimate.model_use import ModelUse
from zerofit.planning.trace_request import trace_request_for

_GPU = GpuSpec(name="any", memory_bytes=1, compute_capability=(8, 6))
_STAGE_3: dict[str, Any] = {"engine": Engine.DEEPSPEED, "zero_stage": ZeroStage.PARAMETERS}
_STAGE_2: dict[str, Any] = {"engine": Engine.DEEPSPEED, "zero_stage": ZeroStage.GRADIENTS}
_BF16: dict[str, Any] = {"precision": Precision.BF16}


@pytest.mark.parametrize(
    ("strategy", "weights", "autocast"),
    [
        (Strategy(), Precision.FP32, None),
        (Strategy(**_BF16), Precision.FP32, Precision.BF16),
        (Strategy(**_BF16, lora=Lora()), Precision.BF16, Precision.BF16),
        (Strategy(**_BF16, **_STAGE_2), Precision.BF16, None),
    ],
)
def test_the_weights_format_and_autocast(
    strategy: Strategy, weights: Precision, autocast: Precision | None
) -> None:
    request = trace_request_for(strategy, Workload(sequence_length=8), _GPU)
    assert (request.weights, request.autocast) == (weights, autocast)
    assert (request.sequence_length, request.compute_capability) == (8, (8, 6))


@pytest.mark.parametrize(
    ("strategy", "saves"),
    [
        (Strategy(**_STAGE_3), False),
        (Strategy(**_STAGE_3, lora=Lora()), True),
        (Strategy(**_STAGE_3, freeze=("*embed*",)), True),
        (Strategy(**_STAGE_2, lora=Lora()), False),
        (Strategy(lora=Lora()), False),
    ],
)
def test_stage_3_keeps_the_inputs_of_linear_layers_where_some_are_frozen(
    strategy: Strategy, saves: bool
) -> None:
    assert trace_request_for(strategy, Workload(), _GPU).saves_linear_inputs is saves


@pytest.mark.parametrize("keeps", [False, True])
def test_the_workload_says_whether_the_loop_holds_the_outputs(keeps: bool) -> None:
    assert trace_request_for(Strategy(), Workload(keeps_outputs=keeps), _GPU).keeps_outputs is keeps


@pytest.mark.parametrize(
    ("strategy", "adapters"),
    [
        (Strategy(**_BF16, lora=Lora()), Precision.FP32),
        (Strategy(**_BF16, **_STAGE_2, lora=Lora()), Precision.BF16),
        (Strategy(**_STAGE_2, lora=Lora()), Precision.FP32),
        (Strategy(**_BF16, **_STAGE_3, lora=Lora()), Precision.FP32),
        (Strategy(**_BF16, **_STAGE_2), Precision.FP32),
    ],
)
def test_deepspeed_casts_adapters_but_beside_a_model_made_under_zero_init(
    strategy: Strategy, adapters: Precision
) -> None:
    assert trace_request_for(strategy, Workload(), _GPU).adapters is adapters


@pytest.mark.parametrize(
    ("strategy", "weights", "autocast"),
    [
        (Strategy(), Precision.FP16, None),
        (Strategy(**_BF16), Precision.FP16, Precision.BF16),
        (Strategy(**_BF16, lora=Lora()), Precision.BF16, Precision.BF16),
        (Strategy(**_STAGE_2), Precision.FP32, None),
        (Strategy(**_BF16, **_STAGE_2), Precision.BF16, None),
    ],
)
def test_without_deepspeed_weights_stay_as_the_script_makes_them(
    strategy: Strategy, weights: Precision, autocast: Precision | None
) -> None:
    request = trace_request_for(strategy, Workload(), _GPU, use=ModelUse(weights=Precision.FP16))
    assert (request.weights, request.autocast) == (weights, autocast)


def test_the_scripts_own_adapters_and_frozen_parts_count_as_a_strategys() -> None:
    use = ModelUse(has_adapters=True, has_frozen=True)
    stage_2 = trace_request_for(Strategy(**_BF16, **_STAGE_2), Workload(), _GPU, use=use)
    stage_3 = trace_request_for(Strategy(**_BF16, **_STAGE_3), Workload(), _GPU, use=use)
    assert (stage_2.adapters, stage_2.saves_linear_inputs) == (Precision.BF16, False)
    assert (stage_3.adapters, stage_3.saves_linear_inputs) == (Precision.FP32, True)


@pytest.mark.parametrize(
    ("strategy", "weights", "unpacks_to"),
    [
        (Strategy(**_BF16, lora=Lora(), quantization=Quantization.NF4), Precision.FP16, Precision.FP16),
        (Strategy(**_BF16, lora=Lora(), quantization=Quantization.NF4), Precision.BF16, None),
        (Strategy(**_BF16, lora=Lora(), quantization=Quantization.NF4), Precision.FP32, Precision.FP32),
        (Strategy(**_BF16, lora=Lora()), Precision.FP16, None),
    ],
)
def test_quantized_weights_are_unpacked_to_the_format_of_their_checkpoint(
    strategy: Strategy, weights: Precision, unpacks_to: Precision | None
) -> None:
    request = trace_request_for(strategy, Workload(), _GPU, use=ModelUse(weights=weights))
    assert request.packing == Packing(unpacks_to=unpacks_to)
