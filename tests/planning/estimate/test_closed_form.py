"""Closed-form logs: whole, lawful, and near what traces of the real classes said."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_steps import closed_form_of

from zerofit.core.allocation_log import (
    LIGER,
    AllocationLog,
    CostKind,
    Event,
    Pass,
    TensorKind,
    TraceRequest,
)
from zerofit.core.freezing import FROZEN_EMBEDDINGS, FROZEN_LAYERS
from zerofit.core.strategy import Lora, Precision
from zerofit.core.units import MIB
from zerofit.models.catalog import catalog_models
from zerofit.models.find import probe_model
from zerofit.models.task import Task
from zerofit.planning.estimate.closed_form.log import closed_form_log
from zerofit.planning.estimate.closed_form.shape import Shape

_BF16 = Precision.BF16


def _peak_bytes(log: AllocationLog, micro_batch_size: int) -> int:
    """Return the most that is alive at a time, gradients of parameters left out."""
    storages = log.storages
    sizes = [
        0 if kind is TensorKind.GRADIENT else fixed + each * micro_batch_size
        for kind, fixed, each in zip(
            storages.kinds, storages.fixed_bytes, storages.bytes_per_sample, strict=True
        )
    ]
    live = peak = 0
    for code, argument in zip(log.codes, log.arguments, strict=True):
        if code == Event.ALLOCATE:
            live += sizes[argument]
            peak = max(peak, live)
        elif code == Event.FREE:
            live -= sizes[argument]
    assert live == 0
    return peak


_REQUESTS = st.builds(
    TraceRequest,
    sequence_length=st.integers(1, 512),
    is_padded=st.booleans(),
    weights=st.sampled_from((Precision.FP32, _BF16)),
    autocast=st.sampled_from((None, _BF16)),
    gradient_checkpointing=st.booleans(),
    checkpoint_every=st.integers(1, 3),
    attention=st.sampled_from((None, "eager")),
    lora=st.sampled_from((None, Lora(rank=8))),
    freeze=st.sampled_from(((), FROZEN_EMBEDDINGS, FROZEN_LAYERS)),
)
_MODELS = ("gpt2", "bert-base-uncased", "t5-small", "qwen3-4b", "mixtral-8x7b", "vit-base")


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(_MODELS), _REQUESTS)
def test_every_storage_is_born_and_dies_once_and_every_module_is_left(
    model: str, request: TraceRequest
) -> None:
    log = closed_form_of(model, request)
    events = list(zip(map(Event, log.codes), log.arguments, strict=True))
    assert max(Counter(events).values()) <= (2 if request.gradient_checkpointing else 1)
    born = [argument for event, argument in events if event is Event.ALLOCATE]
    dead = [argument for event, argument in events if event is Event.FREE]
    gradients = [storage for storage in log.gradient_storages if storage >= 0]
    assert born == list(range(len(log.storages.kinds)))
    assert sorted(dead + gradients) == born
    enters = Counter(argument for event, argument in events if event is Event.FORWARD_ENTER)
    assert enters == Counter(argument for event, argument in events if event is Event.FORWARD_LEAVE)
    ready = {argument for event, argument in events if event is Event.GRADIENT_READY}
    assert ready == {index for index, one in enumerate(log.parameters) if one.trains}


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(_MODELS), _REQUESTS)
def test_more_samples_tokens_or_no_checkpointing_never_need_less(model: str, request: TraceRequest) -> None:
    log = closed_form_of(model, request)
    peak = _peak_bytes(log, 1)
    assert _peak_bytes(log, 2) >= peak
    longer = replace(request, sequence_length=2 * request.sequence_length)
    assert _peak_bytes(closed_form_of(model, longer), 1) >= peak
    assert all(cost.count >= 0 and cost.flops_per_sample >= 0 for cost in log.costs)
    assert any(cost.during is Pass.RECOMPUTATION for cost in log.costs) == request.gradient_checkpointing


@pytest.mark.parametrize("model", ["gpt2", "t5-small", "qwen3-4b"])
def test_every_second_block_costs_half_the_recomputation_and_keeps_between(model: str) -> None:
    request = TraceRequest(sequence_length=512, weights=_BF16, gradient_checkpointing=True)
    each, second = (closed_form_of(model, replace(request, checkpoint_every=every)) for every in (1, 2))
    off = closed_form_of(model, replace(request, gradient_checkpointing=False))
    again = [
        sum(cost.count for cost in log.costs if cost.during is Pass.RECOMPUTATION) for log in (each, second)
    ]
    assert again[1] == pytest.approx(again[0] / 2)
    assert _peak_bytes(each, 4) < _peak_bytes(second, 4) < _peak_bytes(off, 4)


@pytest.mark.parametrize("model", ["gpt2", "t5-small", "qwen3-4b"])
def test_inputs_of_blocks_on_the_host_are_copied_twice_and_not_kept(model: str) -> None:
    kept = TraceRequest(sequence_length=512, weights=_BF16, gradient_checkpointing=True)
    here, away = (closed_form_of(model, replace(kept, activation_offload=moved)) for moved in (False, True))
    copies = {
        during: sum(
            cost.count * cost.bytes_per_sample
            for cost in away.costs
            if (cost.kind, cost.during) == (CostKind.HOST_COPY, during)
        )
        for during in (Pass.FORWARD, Pass.BACKWARD)
    }
    facts = probe_model(model, is_fast=True).facts
    assert copies[Pass.FORWARD] == copies[Pass.BACKWARD] == facts.num_layers * 512 * facts.hidden_size * 2
    assert not any(cost.kind is CostKind.HOST_COPY for cost in here.costs)
    assert _peak_bytes(away, 4) < _peak_bytes(here, 4)


@pytest.mark.slow
def test_the_parameters_of_every_model_of_the_catalog_are_all_there() -> None:
    shares = {}
    for name in catalog_models():
        log = closed_form_of(name, TraceRequest(sequence_length=8))
        found = sum(parameter.num_elements for parameter in log.parameters)
        shares[name] = found / probe_model(name, is_fast=True).facts.num_parameters
    # A layer that is narrower than the largest, as DeepSeek's dense ones, is taken to be as large.
    assert {name: share for name, share in shares.items() if not 0.999 <= share <= 1.1} == {}


_LONG = TraceRequest(sequence_length=4096, weights=_BF16, is_padded=False)
_CLASSES = Task.SEQUENCE_CLASSIFICATION
_TRACED = [
    # What the tracer found (transformers 5.23, torch 2.13): the peak without parameters' gradients.
    ("gpt2", None, 4, TraceRequest(sequence_length=1024, is_padded=False), 7275),
    ("gpt2", None, 4, TraceRequest(sequence_length=1024, autocast=_BF16), 6593),
    ("bert-large-uncased", _CLASSES, 8, TraceRequest(sequence_length=512), 6632),
    ("bert-large-uncased", _CLASSES, 8, TraceRequest(sequence_length=512, autocast=_BF16), 4806),
    ("bert-large-uncased", _CLASSES, 8, TraceRequest(sequence_length=512, attention="eager"), 13346),
    ("bert-large-uncased", Task.MASKED_LM, 8, TraceRequest(sequence_length=512, weights=_BF16), 4366),
    ("llama-3-8b", None, 1, _LONG, 32249),
    ("llama-3-8b", None, 1, replace(_LONG, gradient_checkpointing=True), 8168),
    ("llama-3-8b", None, 2, TraceRequest(sequence_length=2048, autocast=_BF16), 54765),
    ("qwen3-4b", None, 1, TraceRequest(sequence_length=2048, weights=_BF16, is_padded=False), 16168),
    ("gemma-2b", None, 1, TraceRequest(sequence_length=2048, weights=_BF16, is_padded=False), 13416),
    ("mixtral-8x7b", None, 1, TraceRequest(sequence_length=2048, weights=_BF16, is_padded=False), 22716),
]


@pytest.mark.parametrize(("model", "task", "samples", "request_", "traced_mib"), _TRACED)
def test_the_peak_is_within_a_thirtieth_of_the_traced_one(
    model: str, task: Task | None, samples: int, request_: TraceRequest, traced_mib: int
) -> None:
    peak = _peak_bytes(closed_form_of(model, request_, task), samples)
    assert peak / MIB == pytest.approx(traced_mib, rel=0.033)


@pytest.mark.parametrize("weights", [Precision.FP32, _BF16])
def test_a_gradient_is_as_large_as_its_parameter(weights: Precision) -> None:
    log = closed_form_of("gpt2", TraceRequest(sequence_length=8, weights=weights))
    assert {one.trains for one in log.parameters} == {True}
    sizes = [log.storages.fixed_bytes[storage] for storage in log.gradient_storages]
    assert sizes == [one.num_elements * one.bytes_per_element for one in log.parameters]
    assert sum(sizes) == 124_439_808 * (4 if weights is Precision.FP32 else 2)


def test_a_decoder_that_has_an_encoder_keeps_two_attentions_a_layer() -> None:
    log = closed_form_of("t5-small", TraceRequest(sequence_length=64, is_padded=False))
    storages = log.storages
    kept: dict[str, list[int]] = {}
    for kind, module, each in zip(storages.kinds, storages.modules, storages.bytes_per_sample, strict=True):
        if kind is TensorKind.ACTIVATION:
            kept.setdefault(log.modules[module], []).append(each)
    (encoder, *encoder_mlp), (decoder, *decoder_mlp) = (kept[f"model.layers.{layer}"] for layer in (0, 6))
    assert decoder == 2 * encoder
    assert decoder_mlp == encoder_mlp


def test_attention_that_is_written_out_reads_queries_and_keys_and_writes_scores() -> None:
    # 12 heads, 768 wide, bf16: a product has the scores and two operands; six passes read and write scores.
    log = closed_form_of("gpt2", TraceRequest(sequence_length=128, weights=_BF16, attention="eager"))
    scores = 12 * 128 * 128
    found = {
        (cost.operator, cost.during): (cost.count, cost.flops_per_sample, cost.bytes_per_sample)
        for cost in log.costs
        if cost.operator in ("scores", "softmax", "attention")
    }
    product = (2 * 128 * 128 * 768, 2 * (scores + 2 * 128 * 768))
    assert found == {
        ("scores", Pass.FORWARD): (12 * 2, *product),
        ("scores", Pass.BACKWARD): (12 * 2 * 2, *product),
        ("softmax", Pass.FORWARD): (12 * 6, 0, 2 * 2 * scores),
        ("softmax", Pass.BACKWARD): (12 * 6, 0, 2 * 2 * scores),
    }


@pytest.mark.parametrize(("is_padded", "share"), [(True, 1), (False, 2)])
def test_a_kernel_of_attention_skips_what_a_causal_mask_hides(is_padded: bool, share: int) -> None:
    # Two products forward and five backward of 128 x 128 x 768; queries, keys, values and results are moved.
    log = closed_form_of("gpt2", TraceRequest(sequence_length=128, weights=_BF16, is_padded=is_padded))
    flops, moved = 4 * 128 * 128 * 768 // share, 2 * 128 * 4 * 768
    found = {
        cost.during: (cost.count, cost.flops_per_sample, cost.bytes_per_sample)
        for cost in log.costs
        if cost.operator == "attention"
    }
    assert found == {Pass.FORWARD: (12, flops, moved), Pass.BACKWARD: (12, 5 * flops // 2, moved)}


def test_forward_and_backward_do_six_operations_a_parameter_and_token() -> None:
    # 6 P tokens, attention left out: https://arxiv.org/abs/2001.08361 (table 1). The embedding does nothing.
    log = closed_form_of("llama-3-8b", TraceRequest(sequence_length=2048))
    flops = sum(cost.count * cost.flops_per_sample for cost in log.costs if cost.kind.value == "matmul")
    parameters = sum(one.num_elements for one in log.parameters) - 128256 * 4096
    assert flops == pytest.approx(6 * parameters * 2048, rel=0.001)


def test_logits_of_a_fused_loss_exist_in_pieces_as_wide_as_the_hidden_state() -> None:
    request = TraceRequest(sequence_length=512, weights=_BF16, keeps_outputs=False)
    model = probe_model("qwen3-4b").facts
    plain, fused = (
        _peak_bytes(closed_form_log(model, replace(request, kernels=kernels)), 8) for kernels in ((), LIGER)
    )
    tokens, whole, at_once = 8 * 512, model.vocab_size, model.hidden_size
    assert plain - fused > 2 * 4 * tokens * (whole - at_once)


def test_under_lora_only_adapters_train_and_lie_in_fp32() -> None:
    log = closed_form_of("llama-3-8b", TraceRequest(sequence_length=8, weights=_BF16, lora=Lora(rank=16)))
    trained = [one for one in log.parameters if one.trains]
    # Query and value of 32 layers: rank x (4096 + 4096) and rank x (4096 + 1024).
    assert sum(one.num_elements for one in trained) == 32 * 16 * (8192 + 5120)
    assert {one.bytes_per_element for one in trained} == {4}
    assert {one.bytes_per_element for one in log.parameters if not one.trains} == {2}


def test_adapters_train_whole_also_where_a_script_freezes_half_of_the_model() -> None:
    facts = probe_model("llama-3-8b", is_fast=True).facts
    half = replace(facts, num_trainable_parameters=facts.num_parameters // 2)
    parameters = closed_form_log(half, TraceRequest(sequence_length=8, lora=Lora(rank=16))).parameters
    assert sum(one.num_elements for one in parameters if one.trains) == 32 * 16 * (8192 + 5120)


@pytest.mark.parametrize("precision", [Precision.FP32, _BF16, Precision.FP16])
def test_products_run_in_the_precision_of_the_request_and_all_else_in_fp32(precision: Precision) -> None:
    for request in (
        TraceRequest(sequence_length=8, weights=precision),
        TraceRequest(sequence_length=8, autocast=precision),
    ):
        found = {(cost.kind, cost.precision) for cost in closed_form_of("gpt2", request).costs}
        assert found == {
            (CostKind.MATMUL, precision),
            (CostKind.ATTENTION, precision),
            (CostKind.MEMORY, Precision.FP32),
        }


def test_what_a_script_freezes_does_not_train() -> None:
    facts = probe_model("llama-3-8b", is_fast=True).facts
    some = replace(facts, num_trainable_parameters=facts.num_parameters // 100)
    parameters = closed_form_log(some, TraceRequest(sequence_length=8)).parameters
    trained = sum(one.num_elements for one in parameters if one.trains)
    assert sum(one.num_elements for one in parameters) == facts.num_parameters
    assert 0.99 < trained / some.num_trainable_parameters <= 1


@pytest.mark.parametrize(
    ("name", "task", "first", "last"),
    [
        ("vit-base", Task.IMAGE_CLASSIFICATION, 14 * 14 + 1, 14 * 14 + 1),
        ("whisper-small", Task.SPEECH_SEQ2SEQ, 1500, 64),
        ("t5-small", Task.SEQ2SEQ_LM, 64, 64),
    ],
)
def test_patches_and_frames_count_as_positions_where_an_encoder_reads_no_tokens(
    name: str, task: Task, first: int, last: int
) -> None:
    facts = probe_model(name, task=task).facts
    shape = Shape(facts=facts, request=TraceRequest(sequence_length=64))
    assert (shape.tokens(0), shape.tokens(facts.num_layers - 1)) == (first, last)
