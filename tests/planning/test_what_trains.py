"""The less trains, the less memory a strategy takes; a quantized base takes even less."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from planning_problems import RATES, made_trace, model, problem

from zerofit.core.strategy import Engine, Lora, OffloadDevice, Precision, Quantization, Strategy, ZeroStage
from zerofit.planning.closed_form_estimator import ClosedFormEstimator

_FREEZES = [("embeddings",), ("embeddings+1",), ("embeddings+2",), ("blocks",), ("all-but-head",)]
_MODEL = model(num_parameters=140_000_000, num_trainable_parameters=140_000_000)
_PROBLEM = problem(num_gpus=2, facts=_MODEL)
_ESTIMATOR = ClosedFormEstimator(_PROBLEM, trace=made_trace(_MODEL), rates=RATES)
_LORA = Lora(rank=4, alpha=8)


@some.composite
def _strategies(draw: some.DrawFn, *, stages: tuple[int, ...] = (0, 1, 2, 3)) -> Strategy:
    stage = ZeroStage(draw(some.sampled_from(stages)))
    offloads = draw(some.booleans()) and stage >= ZeroStage.GRADIENTS
    return Strategy(
        engine=Engine.NATIVE if stage is ZeroStage.NOTHING else Engine.DEEPSPEED,
        zero_stage=stage,
        optimizer_offload=OffloadDevice.CPU if offloads else OffloadDevice.NONE,
        precision=draw(some.sampled_from([Precision.BF16, Precision.FP32])),
        micro_batch_size=draw(some.sampled_from([1, 4])),
        gradient_accumulation_steps=draw(some.sampled_from([1, 2])),
        gradient_checkpointing=draw(some.booleans()),
    )


def _peak(strategy: Strategy) -> int:
    return _ESTIMATOR.estimate(strategy).estimate.device.peak_bytes


@settings(max_examples=40, deadline=None)
@given(_strategies(), some.sampled_from(_FREEZES))
def test_what_is_frozen_takes_no_more_memory(strategy: Strategy, freeze: tuple[str, ...]) -> None:
    assert _peak(replace(strategy, freeze=freeze)) <= _peak(strategy)


@settings(max_examples=40, deadline=None)
@given(_strategies())
def test_adapters_take_no_more_memory_than_whole_weights(strategy: Strategy) -> None:
    own = 2 * _LORA.rank * (_MODEL.hidden_size * 2) * _MODEL.num_layers  # of query and value
    assert _peak(replace(strategy, lora=_LORA)) <= _peak(strategy) + 16 * own  # the rest may lie elsewhere


@settings(max_examples=40, deadline=None)
@given(_strategies(stages=(0, 1, 2)))
def test_a_quantized_base_takes_less_memory(strategy: Strategy) -> None:
    adapted = replace(strategy, lora=replace(_LORA, target_modules=("all-linear",)))
    assert _peak(replace(adapted, quantization=Quantization.NF4)) < _peak(adapted)


@pytest.mark.parametrize(
    ("freeze", "lora", "quantization"),
    [*((freeze, None, None) for freeze in _FREEZES), ((), _LORA, None), ((), _LORA, Quantization.NF4)],
)
def test_a_bound_is_never_above_the_estimate(
    freeze: tuple[str, ...], lora: Lora | None, quantization: Quantization | None
) -> None:
    for stage in (ZeroStage.NOTHING, ZeroStage.GRADIENTS):
        strategy = Strategy(
            engine=Engine.DEEPSPEED if stage else Engine.NATIVE,
            zero_stage=stage,
            precision=Precision.BF16,
            micro_batch_size=1,
            gradient_accumulation_steps=1,
            freeze=freeze,
            lora=lora,
            quantization=quantization,
        )
        bounds = (_ESTIMATOR.least_bytes, _ESTIMATOR.least_live_bytes, _ESTIMATOR.least_played_bytes)
        assert all(bound(strategy) <= _peak(strategy) for bound in bounds)


def test_the_closed_forms_are_less_sure_of_what_trains_in_part() -> None:
    whole, partly = Strategy(), Strategy(freeze=("all-but-head",))
    assert [_ESTIMATOR.estimate(one).estimate.device.uncertainty for one in (whole, partly)] == [0.2, 0.6]
    packed = _ESTIMATOR.estimate(Strategy(lora=_LORA, quantization=Quantization.NF4)).estimate.step_time
    assert packed is not None
    assert packed.uncertainty == 2.0
