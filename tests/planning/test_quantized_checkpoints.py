"""Plans of checkpoints that are quantized themselves, and of scripts that load such weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from captured_scripts import capture, captured_problem
from planning_problems import LARGE, VERSIONS, closed_forms, machine, problem, solved, spec_of, subject

from zerofit.core.errors import UserError
from zerofit.core.plan import Topology
from zerofit.core.strategy import Engine, Lora, Precision, Quantization, Strategy, ZeroStage
from zerofit.models.weight_formats import format_of
from zerofit.planning.candidates import candidates
from zerofit.planning.estimate.model_use import use_in_script, use_of_named
from zerofit.planning.make_problem import problem_of
from zerofit.planning.problem import Problem

_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
_INT8 = {"load_in_8bit": True}
_NF4 = {"load_in_4bit": True}
_FORMATS: list[tuple[dict[str, Any], float]] = [(_NF4, 4.5), (_INT8, 8.008), (_GPTQ, 4.164)]


def _named(said: dict[str, Any] | None, **fields: Any) -> Problem:
    form = None if said is None else format_of({"quantization_config": said})
    use = use_of_named(LARGE, Precision.BF16, weight_format=form)
    return problem(facts=LARGE, use=use, num_gpus=1, global_batch_size=1, **fields)


def _weights(asked: Problem) -> int:
    strategy = Strategy(
        engine=Engine.NATIVE,
        precision=Precision.BF16,
        lora=Lora(),
        micro_batch_size=1,
        gradient_accumulation_steps=1,
    )
    device = closed_forms(asked).estimate(strategy).estimate.device
    phase = max(device.phases, key=lambda phase: phase.total_bytes)
    return sum(term.num_bytes for term in phase.terms if term.name == "weights")


@pytest.mark.parametrize(("said", "bits"), _FORMATS)
def test_closed_forms_count_a_quantized_checkpoint_by_its_bits(said: dict[str, Any], bits: float) -> None:
    plain, packed = _weights(_named(None)), _weights(_named(said))
    hidden, inner = LARGE.hidden_size, LARGE.intermediate_size
    head = LARGE.num_attention_heads * LARGE.head_dim
    keys = LARGE.num_key_value_heads * LARGE.head_dim
    gated = 3 if LARGE.is_gated else 2
    in_layers = LARGE.num_layers * hidden * (2 * head + 2 * keys + gated * inner)
    assert plain - packed == pytest.approx(in_layers * (16 - bits) / 8, rel=0.001)


@pytest.mark.parametrize("said", [_NF4, _INT8, _GPTQ])
def test_a_quantized_checkpoint_is_trained_by_adapters_and_neither_sharded_nor_quantized_again(
    said: dict[str, Any],
) -> None:
    found = candidates(_named(said, spec=spec_of(lora=Lora())), with_fsdp2=True).strategies
    assert found
    assert {strategy.lora for strategy in found} == {Lora()}
    assert {strategy.engine for strategy in found} <= {Engine.NATIVE, Engine.DEEPSPEED}
    assert ZeroStage.PARAMETERS not in {strategy.zero_stage for strategy in found}
    assert {strategy.quantization for strategy in found} == {None}


def test_a_quantized_checkpoint_fits_where_the_plain_model_does_not() -> None:
    small = {"memory_gib": 7, "spec": spec_of(lora=Lora(), engine=Engine.NATIVE)}
    assert not solved(_named(None, **small)).fits
    assert solved(_named(_GPTQ, **small)).fits


@pytest.mark.parametrize(
    ("said", "flags", "rule", "found"),
    [
        (_GPTQ, {}, "quantization-needs-lora", "GPTQ in 4 bits, groups of 128, without adapters"),
        (
            _INT8,
            {"lora": Lora(), "zero_stage": ZeroStage.PARAMETERS},
            "quantized-base-not-partitioned",
            "bitsandbytes' int8, and --zero-stage",
        ),
        (
            _NF4,
            {"lora": Lora(), "quantization": Quantization.NF4},
            "quantized-base-not-partitioned",
            "bitsandbytes' 4 bits, and --qlora",
        ),
        (
            {"quant_method": "fbgemm_fp8"},
            {"lora": Lora()},
            "quantized-checkpoint-not-trained",
            "FBGEMM's FP8",
        ),
    ],
)
def test_what_a_quantized_checkpoint_can_t_do_is_an_error(
    said: dict[str, Any], flags: dict[str, Any], rule: str, found: str
) -> None:
    form = format_of({"quantization_config": said})
    asked = subject(LARGE, use=use_of_named(LARGE, Precision.BF16, weight_format=form))
    with pytest.raises(UserError) as caught:
        problem_of(
            spec_of(**flags), asked, machine=machine(2), topology=Topology(world_size=2), versions=VERSIONS
        )
    assert caught.value.rule == rule
    assert caught.value.found is not None
    assert caught.value.found.endswith(found)


@pytest.mark.parametrize("method", ["mxfp4", "compressed-tensors"])
def test_a_checkpoint_that_is_unpacked_trains_as_a_plain_one(method: str) -> None:
    form = format_of({"quantization_config": {"quant_method": method}})
    use = use_of_named(LARGE, Precision.BF16, weight_format=form)
    assert not use.is_packed
    assert use.narrowest_weight_bytes == 2


@pytest.mark.parametrize(
    ("said", "notes"),
    [
        (_NF4, ()),
        (
            _INT8,
            (
                "the linear layers of small are in bitsandbytes' int8: 8 bits a weight; embeddings, norms "
                "and the head stay wide",
                "not known of bitsandbytes' int8: the copies of outlier columns, which depend on the values "
                "of activations",
            ),
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]},
            (
                "the linear layers of small are in FP8 in blocks of 128 x 128: 8 bits a weight; embeddings, "
                "norms and lm_head stay wide",
            ),
        ),
        (
            {"quant_method": "aqlm"},
            ("the weights of small are counted as wide as they are before quantization",),
        ),
    ],
)
def test_a_plan_says_how_a_script_s_quantized_weights_are_counted(
    said: dict[str, Any], notes: tuple[str, ...]
) -> None:
    captured = capture(model_is_quantized=True, model_config={"quantization_config": said})
    assert captured_problem(captured).notes == notes


@pytest.mark.parametrize(
    ("said", "bitsandbytes", "uncertainty"),
    [
        (None, "0.50.2", 0.08),
        (_NF4, "0.50.2", 0.15),
        (_NF4, None, 0.15),
        (_NF4, "0.43.3", 0.3),
        (_GPTQ, "0.50.2", 0.3),
        (_INT8, "0.50.2", 0.3),
        ({"quant_method": "compressed-tensors"}, "0.50.2", 0.08),
    ],
)
def test_quantized_weights_have_an_uncertainty_of_their_own(
    said: dict[str, Any] | None, bitsandbytes: str | None, uncertainty: float
) -> None:
    from zerofit.planning.estimate.device_memory.memory import estimate_memory

    captured = capture(model_is_quantized=said is not None, model_config={"quantization_config": said})
    asked = captured_problem(captured, num_gpus=1)
    assert use_in_script(captured).weight_format == format_of(captured.model.config)
    estimator = closed_forms(replace(asked, versions=replace(VERSIONS, bitsandbytes=bitsandbytes)))
    strategy = Strategy(precision=Precision.BF16, micro_batch_size=1, gradient_accumulation_steps=1)
    setup = estimator._setup(strategy)
    assert estimate_memory(setup, gpu=asked.smallest_gpu).uncertainty == uncertainty
