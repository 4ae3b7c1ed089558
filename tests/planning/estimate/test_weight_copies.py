"""Mixed precision on real traces: more for a large model and a small batch, less the other way round."""

from __future__ import annotations

from functools import cache

import pytest
from tiny_traces import trace_of_two_runs

from zerofit.core.allocation_log import AllocationLog, TraceRequest
from zerofit.core.estimates import RunPhase
from zerofit.core.facts import Versions
from zerofit.core.plan import Topology
from zerofit.core.strategy import Engine, OptimizerName, Precision, Strategy, ZeroStage
from zerofit.planning.estimate.device_memory.memory import play_strategy
from zerofit.planning.estimate.device_memory.replay import TapePeak, replay_live
from zerofit.planning.estimate.engines.engine import WEIGHT_COPIES, Setup, terms_of

_LARGE, _SMALL = (512, 8, 2), (64, 128, 64)
"""Hidden size, tokens a sample and samples: much of a weight, and much of a batch."""
_BY_SCRIPT = (Engine.NATIVE, ZeroStage.NOTHING)


@cache
def _traced(
    hidden: int, length: int, samples: int, precision: Precision, *, checkpointing: bool = False
) -> AllocationLog:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=2,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64, max_position_embeddings=128,
        use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    request = TraceRequest(
        sequence_length=length,
        autocast=None if precision is Precision.FP32 else precision,
        gradient_checkpointing=checkpointing,
    )
    return trace_of_two_runs(config, transformers.LlamaForCausalLM._from_config, request).log_for(samples)


def _live(
    log: AllocationLog, samples: int, strategy: tuple[Engine, ZeroStage] = _BY_SCRIPT
) -> dict[RunPhase, TapePeak]:
    setup = Setup(
        log=log,
        strategy=Strategy(
            engine=strategy[0],
            zero_stage=strategy[1],
            micro_batch_size=samples,
            gradient_accumulation_steps=2,
            optimizer=OptimizerName.ADAMW,
        ),
        topology=Topology(world_size=1),
        versions=Versions(python="3.11", zerofit="0"),
    )
    tape = play_strategy(setup).tape
    return {peak.phase: peak for peak in replay_live(tape).peaks}


def _weights(log: AllocationLog) -> int:
    return sum(one.num_elements * one.bytes_per_element for one in log.parameters)


@pytest.mark.slow
def test_a_large_model_with_a_small_batch_needs_half_its_weights_more_than_in_fp32() -> None:
    mixed = _traced(*_LARGE, Precision.FP16)
    forward = dict(_live(mixed, _LARGE[2])[RunPhase.FORWARD].live)
    held = forward["weights"] + forward[WEIGHT_COPIES]
    assert held == pytest.approx(1.5 * _weights(mixed), rel=0.02)  # all but the embedding's 2 % and the norms
    fp32 = _traced(*_LARGE, Precision.FP32)
    most = [max(peak.live_bytes for peak in _live(log, _LARGE[2]).values()) for log in (fp32, mixed)]
    assert most[1] - most[0] == pytest.approx(0.5 * _weights(mixed), rel=0.15)


@pytest.mark.slow
def test_a_small_model_with_a_large_batch_needs_less_than_in_fp32() -> None:
    most = [
        max(peak.live_bytes for peak in _live(_traced(*_SMALL, one), _SMALL[2]).values())
        for one in (Precision.FP32, Precision.FP16)
    ]
    assert most[1] < 0.9 * most[0]


def test_a_log_without_autocast_has_no_copies() -> None:
    assert WEIGHT_COPIES not in terms_of(_traced(*_LARGE, Precision.FP32))


def test_each_linear_layer_has_one_copy_of_its_weight() -> None:
    log = _traced(*_LARGE, Precision.FP16)
    copied = [
        log.modules[module]
        for module, term in zip(log.storages.modules, terms_of(log), strict=True)
        if term == WEIGHT_COPIES
    ]
    linear = [name for name in log.modules if name.endswith(("_proj", "lm_head"))]
    assert copied == linear


@pytest.mark.parametrize("stage", [None, *ZeroStage], ids=str)
def test_checkpointing_keeps_less_of_a_real_model_in_the_forward_pass(stage: ZeroStage | None) -> None:
    strategy = _BY_SCRIPT if stage is None else (Engine.DEEPSPEED, stage)
    kept, recomputed = (
        _live(_traced(*_SMALL, Precision.FP16, checkpointing=checkpointing), _SMALL[2], strategy)
        for checkpointing in (False, True)
    )
    assert recomputed[RunPhase.FORWARD].live_bytes < kept[RunPhase.FORWARD].live_bytes
