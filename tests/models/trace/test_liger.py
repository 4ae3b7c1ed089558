"""Liger's kernels by what they allocate: no whole logits, no copies in norms, rotations and gates."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from zerofit.core.allocation_log import LIGER, CostKind, Event, FusedKernel, TensorKind, TraceRequest
from zerofit.core.errors import UserError
from zerofit.core.strategy import Lora, Precision
from zerofit.models.trace.live import trace_live

_LENGTH, _WIDTH, _WORDS, _INNER, _LAYERS = 96, 64, 2048, 256, 2
_SIZES: dict[str, Any] = {
    "hidden_size": _WIDTH,
    "intermediate_size": _INNER,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": _LAYERS,
    "vocab_size": _WORDS,
    "pad_token_id": 0,
}
_REQUEST = TraceRequest(sequence_length=_LENGTH, is_padded=False, keeps_outputs=False)
_LOGITS = _LENGTH * _WORDS * 4
"""Bytes of a sample's logits."""
_PIECES = _WORDS // _WIDTH


def _llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**_SIZES))


def _trace(model: Any, *kernels: FusedKernel, **changes: Any) -> Any:
    length = changes.get("sequence_length", _LENGTH)
    ids = torch.zeros(2, length, dtype=torch.int64)
    request = replace(_REQUEST, kernels=kernels, **changes)
    return trace_live(model.train(), ((), {"input_ids": ids, "labels": ids.clone()}), request)


@cache
def _of_llama(*kernels: FusedKernel) -> Any:
    return _trace(_llama(), *kernels)


def _bytes(log: Any, samples: int = 3) -> list[int]:
    sizes = zip(log.storages.fixed_bytes, log.storages.bytes_per_sample, strict=True)
    return [fixed + samples * each for fixed, each in sizes]


def _kept(log: Any) -> int:
    """Return the bytes that live where the forward pass ends."""
    sizes, live = _bytes(log), 0
    for code, argument in zip(log.codes, log.arguments, strict=True):
        if code == Event.FORWARD_ENDS:
            break
        if code in (Event.ALLOCATE, Event.FREE):
            live += sizes[argument] if code == Event.ALLOCATE else -sizes[argument]
    return live


def _head_of(log: Any) -> int:
    return next(number for number, weight in enumerate(log.parameters) if weight.name == "lm_head.weight")


@pytest.mark.parametrize("samples", [1, 3, 24])
def test_logits_exist_in_pieces_as_large_in_all_as_the_hidden_states(samples: int) -> None:
    plain, fused = (_bytes(_of_llama(*kernels).log_for(samples), samples) for kernels in ((), LIGER))
    assert max(plain) == samples * _LOGITS
    of_a_block, of_the_heads_gradient = samples * _LENGTH * _INNER * 4, _WORDS * _WIDTH * 4
    assert max(fused) == max(of_a_block, of_the_heads_gradient)
    assert fused.count(samples * _LOGITS // _PIECES) >= _PIECES


def test_each_kernel_keeps_less_than_what_it_replaces() -> None:
    plain = _kept(_of_llama().log_for(3))
    without_loss = _kept(_trace(_llama(), *LIGER[:-1]).log_for(3))
    of_norms, of_gates = (2 * _LAYERS + 1) * _WIDTH, _LAYERS * _INNER
    assert plain - without_loss >= 3 * _LENGTH * 4 * (of_norms + of_gates)


@pytest.mark.slow
def test_the_first_fused_loss_has_logits_in_fp32_and_a_copy_of_the_hidden_states() -> None:
    first = FusedKernel.FIRST_FUSED_LINEAR_CROSS_ENTROPY
    sizes = _bytes(_trace(_llama(), first, weights=Precision.BF16).log_for(3))
    columns = -(-(_LENGTH - 1) // _PIECES)
    assert {3 * columns * _WORDS * 4, 3 * columns * _WORDS * 2, 3 * (_LENGTH - 1) * _WIDTH * 2} <= {*sizes}


def test_the_heads_gradient_is_made_in_the_forward_pass_and_its_weights_are_read_with_the_model() -> None:
    log = _of_llama(*LIGER).log_for(3)
    storage = log.gradient_storages[_head_of(log)]
    events = list(zip(log.codes, log.arguments, strict=True))
    assert events.index((Event.ALLOCATE, storage)) < events.index((Event.FORWARD_ENDS, 0))
    assert log.storages.kinds[storage] is TensorKind.GRADIENT
    assert log.module_parameters[log.modules.index("")] == (_head_of(log),)
    assert _of_llama().log_for(3).module_parameters[0] == ()


def test_the_loss_takes_the_time_of_three_products_with_the_head() -> None:
    def flops(log: Any) -> int:
        return sum(
            cost.count * (cost.fixed_flops + 3 * cost.flops_per_sample)
            for cost in log.costs
            if cost.kind is CostKind.MATMUL and cost.during.value == "forward"
        )

    plain, fused = (flops(_of_llama(*kernels).log_for(3)) for kernels in ((), LIGER))
    assert fused - plain == 2 * 2 * 3 * _LENGTH * _WIDTH * _WORDS


@pytest.mark.slow
def test_a_frozen_heads_gradient_is_not_computed_and_any_length_is_divided_evenly() -> None:
    lora = Lora(rank=4, target_modules=("q_proj",))
    trace = _trace(_llama(), *LIGER, lora=lora, sequence_length=101)
    assert trace.logs[0].least_micro_batch_size <= 2
    assert _WORDS * _WIDTH * 4 not in _bytes(trace.log_for(3))


@pytest.mark.slow
def test_phis_gates_are_copied_and_its_logits_are_not_whole() -> None:
    sizes = _bytes(_trace(Phi3ForCausalLM(Phi3Config(**_SIZES)), *LIGER).log_for(3))
    assert max(sizes) < 3 * _LOGITS
    assert sizes.count(3 * _LENGTH * _INNER * 4) >= 3 * _LAYERS  # gate, up and their product


@pytest.mark.slow
def test_granites_logits_are_whole_and_become_their_gradient() -> None:
    sizes = _bytes(_trace(GraniteForCausalLM(GraniteConfig(**_SIZES)), *LIGER).log_for(3))
    assert 0 < sizes.count(3 * _LOGITS) < _bytes(_of_llama().log_for(3)).count(3 * _LOGITS)


@pytest.mark.slow
def test_without_labels_logits_are_whole_and_a_traced_model_computes_as_before() -> None:
    model, ids = _llama().train(), torch.zeros(2, _LENGTH, dtype=torch.int64)
    before = model(input_ids=ids, labels=ids)
    log = trace_live(model, ((), {"input_ids": ids}), replace(_REQUEST, kernels=LIGER)).log_for(3)
    assert max(_bytes(log)) == 3 * _LOGITS
    after = model(input_ids=ids, labels=ids)
    assert torch.equal(before.logits, after.logits)
    assert torch.equal(before.loss, after.loss)


def test_a_family_without_kernels_is_refused_as_by_a_launch() -> None:
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
    with pytest.raises(UserError) as refused:
        _trace(BertForMaskedLM(BertConfig(**sizes)), *LIGER)
    assert refused.value.rule == "liger-family-unknown"
    assert refused.value.found == "Liger's kernels, and BertForMaskedLM of the family bert"
