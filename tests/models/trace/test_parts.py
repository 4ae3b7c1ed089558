"""The first rank's part of a traced model: what ranks that share a sample halve, and what stays whole."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from tiny_traces import trace_of_two_runs

from zerofit.core.allocation_log import AllocationLog, CostKind, TraceRequest
from zerofit.core.errors import UserError
from zerofit.core.strategy import Precision
from zerofit.models.trace.entry import trace_config
from zerofit.planning.memory_bounds import highest, live_lines

_REQUEST = TraceRequest(
    sequence_length=256,
    is_padded=False,
    weights=Precision.BF16,
    compute_capability=(9, 0),
    keeps_outputs=False,
)
_LAYERS = 2


def _model(
    *, heads: int = 4, num_layers: int = _LAYERS, tie_word_embeddings: bool = False
) -> tuple[Any, Any]:
    """Return the configuration of a small Llama and what builds it."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=16 * heads, intermediate_size=176, num_hidden_layers=num_layers,
        num_attention_heads=heads, num_key_value_heads=heads, tie_word_embeddings=tie_word_embeddings,
    )  # fmt: skip
    return config, transformers.AutoModelForCausalLM.from_config


@cache
def _log(size: int, *, tie_word_embeddings: bool = False, **fields: Any) -> AllocationLog:
    request = replace(_REQUEST, sequence_parallel_size=size, **fields)
    return trace_of_two_runs(*_model(tie_word_embeddings=tie_word_embeddings), request).log_for(2)


@pytest.mark.parametrize(
    ("fields", "num_layers"),
    [
        pytest.param({"sequence_parallel_size": 2}, 1, marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2}, 1, marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel_size": 2, "pipeline_place": 1}, 2, marks=pytest.mark.slow),
    ],
)
def test_two_runs_make_the_trace_that_more_runs_check(fields: dict[str, int], num_layers: int) -> None:
    request, model = replace(_REQUEST, **fields), _model(num_layers=num_layers)
    assert trace_of_two_runs(*model, request).logs[0] == trace_config(*model, request).log_for(2)


def _flops(log: AllocationLog) -> int:
    return sum(cost.count * (cost.fixed_flops + 2 * cost.flops_per_sample) for cost in log.costs)


def _exchanged(log: AllocationLog) -> dict[tuple[str, str], tuple[int, int]]:
    """Return (calls, bytes of two samples) of each collective in each pass."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for cost in log.costs:
        if cost.kind is CostKind.EXCHANGE:
            key = cost.operator.split(".")[1], cost.during.value
            calls, num_bytes = found.get(key, (0, 0))
            each = cost.fixed_bytes + 2 * cost.bytes_per_sample
            found[key] = calls + cost.count, num_bytes + cost.count * each
    return found


@pytest.mark.parametrize(
    "fields", [{}, pytest.param({"gradient_checkpointing": True}, marks=pytest.mark.slow)]
)
def test_ranks_that_share_tokens_share_activations_and_operations(fields: dict[str, bool]) -> None:
    whole, half = (_log(size, **fields) for size in (1, 2))
    assert _flops(half) * 2 == _flops(whole)
    needs = [highest(live_lines(log, with_gradients=False), 2) for log in (whole, half)]
    assert needs[1] / needs[0] == pytest.approx(0.5, abs=0.02)
    assert half.parameters == whole.parameters


def test_queries_keys_values_and_outputs_are_exchanged_in_every_pass() -> None:
    tokens, width, calls = 2 * 256 // 2, 2 * 64, 4 * _LAYERS
    once = calls, calls * tokens * width
    found = _exchanged(_log(2))
    assert (found["all_to_all", "forward"], found["all_to_all", "backward"]) == (once, once)
    # What is computed again in the backward pass is exchanged again.
    again = _exchanged(_log(2, gradient_checkpointing=True))
    assert (again["all_to_all", "recomputation"], again["all_to_all", "backward"]) == (once, once)
    assert _exchanged(_log(1)) == {}


def test_a_mask_of_padding_stays_whole_on_each_rank() -> None:
    padded, plain = _log(2, is_padded=True), _log(2)
    more = [highest(live_lines(log, with_gradients=False), 2) for log in (padded, plain)]
    assert more[0] - more[1] >= 2 * 256 * 256


def test_a_model_that_ranks_cannot_share_is_refused_and_the_attention_put_back() -> None:
    from transformers import AttentionInterface

    before = AttentionInterface()["sdpa"]
    with pytest.raises(UserError) as refused:
        trace_config(*_model(heads=3), replace(_REQUEST, sequence_parallel_size=2))
    assert refused.value.rule == "sequence-parallel-heads"
    trace_config(*_model(num_layers=1), replace(_REQUEST, sequence_parallel_size=2))
    assert AttentionInterface()["sdpa"] is before


def test_ranks_that_share_layers_hold_parts_of_them_and_sum_their_outputs() -> None:
    whole, part = _log(1), _log(1, tensor_parallel_size=2)
    sizes = [{one.name: one.num_elements for one in log.parameters} for log in (whole, part)]
    for name, elements in sizes[0].items():
        is_whole = "norm" in name or "embed_tokens" in name
        assert sizes[1][name] == elements // (1 if is_whole else 2), name
    assert _flops(part) * 2 == _flops(whole)
    tokens, hidden, layers, vocabulary = 2 * 256, 2 * 64, _LAYERS, 2 * 512
    found = _exchanged(part)
    # Outputs of attention and of the feed-forward block; gradients of inputs of five layers cut by columns.
    assert found["all_reduce", "forward"] == (2 * layers, 2 * layers * tokens * hidden)
    assert found["all_reduce", "backward"] == (5 * layers + 1, (5 * layers + 1) * tokens * hidden)
    assert found["all_gather_into", "forward"] == (1, tokens * vocabulary // 2)


def test_a_tied_head_stays_whole() -> None:
    part = _log(1, tensor_parallel_size=2, tie_word_embeddings=True)
    assert [one.num_elements for one in part.parameters if "embed" in one.name] == [512 * 64]


def test_a_model_without_a_plan_of_its_cuts_is_not_estimated() -> None:
    from transformers import OPTConfig, OPTForCausalLM

    from zerofit.models.trace.layer_parts import cut_layers
    from zerofit.models.trace.parts import Absent

    config = OPTConfig(vocab_size=64, hidden_size=16, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(UserError) as refused:
        cut_layers(OPTForCausalLM(config), Absent(2))
    assert refused.value.rule == "tensor-parallel-not-estimated"
