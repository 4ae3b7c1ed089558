"""Closed-form logs: whole, lawful, and near what traces of the real classes said."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timed_plans import closed_form_of

from zerofit.allocation_log import AllocationLog, Event, Pass, TensorKind, TraceRequest
from zerofit.estimate.closed_form import closed_form_log
from zerofit.planning.freezing import FROZEN_EMBEDDINGS, FROZEN_LAYERS
from zerofit.probe.model import probe_model
from zerofit.probe.model_catalog import catalog_models
from zerofit.probe.model_task import Task
from zerofit.strategy import Lora, Precision
from zerofit.units import MIB

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


@pytest.mark.parametrize("name", sorted(catalog_models()))
def test_the_parameters_of_every_model_of_the_catalog_are_all_there(name: str) -> None:
    facts = probe_model(name, is_fast=True).facts
    log = closed_form_of(name, TraceRequest(sequence_length=8))
    found = sum(one.num_elements for one in log.parameters)
    # A layer that is narrower than the largest, as DeepSeek's dense ones, is taken to be as large.
    assert found >= facts.num_parameters * 0.999
    assert found <= facts.num_parameters * 1.1


_TRACED = [
    # What the tracer found (transformers 5.23, torch 2.13): the peak without parameters' gradients.
    ("gpt2", None, 4, TraceRequest(sequence_length=1024, is_padded=False), 7275),
    ("gpt2", None, 4, TraceRequest(sequence_length=1024, autocast=_BF16), 6593),
    ("bert-large-uncased", Task.SEQUENCE_CLASSIFICATION, 8, TraceRequest(sequence_length=512), 6632),
    (
        "bert-large-uncased",
        Task.SEQUENCE_CLASSIFICATION,
        8,
        TraceRequest(sequence_length=512, autocast=_BF16),
        4806,
    ),
    (
        "bert-large-uncased",
        Task.SEQUENCE_CLASSIFICATION,
        8,
        TraceRequest(sequence_length=512, attention="eager"),
        13346,
    ),
    ("bert-large-uncased", Task.MASKED_LM, 8, TraceRequest(sequence_length=512, weights=_BF16), 4366),
    ("llama-3-8b", None, 1, TraceRequest(sequence_length=4096, weights=_BF16, is_padded=False), 32249),
    (
        "llama-3-8b",
        None,
        1,
        TraceRequest(sequence_length=4096, weights=_BF16, is_padded=False, gradient_checkpointing=True),
        8168,
    ),
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


def test_forward_and_backward_do_six_operations_a_parameter_and_token() -> None:
    # 6 P tokens, attention left out: https://arxiv.org/abs/2001.08361 (table 1). The embedding does nothing.
    log = closed_form_of("llama-3-8b", TraceRequest(sequence_length=2048))
    flops = sum(cost.count * cost.flops_per_sample for cost in log.costs if cost.kind.value == "matmul")
    parameters = sum(one.num_elements for one in log.parameters) - 128256 * 4096
    assert flops == pytest.approx(6 * parameters * 2048, rel=0.001)


def test_under_lora_only_adapters_train_and_lie_in_fp32() -> None:
    log = closed_form_of("llama-3-8b", TraceRequest(sequence_length=8, weights=_BF16, lora=Lora(rank=16)))
    trained = [one for one in log.parameters if one.trains]
    # Query and value of 32 layers: rank x (4096 + 4096) and rank x (4096 + 1024).
    assert sum(one.num_elements for one in trained) == 32 * 16 * (8192 + 5120)
    assert {one.bytes_per_element for one in trained} == {4}
    assert {one.bytes_per_element for one in log.parameters if not one.trains} == {2}


def test_what_a_script_freezes_does_not_train() -> None:
    facts = probe_model("llama-3-8b", is_fast=True).facts
    some = replace(facts, num_trainable_parameters=facts.num_parameters // 100)
    parameters = closed_form_log(some, TraceRequest(sequence_length=8)).parameters
    trained = sum(one.num_elements for one in parameters if one.trains)
    assert sum(one.num_elements for one in parameters) == facts.num_parameters
    assert 0.99 < trained / some.num_trainable_parameters <= 1


def test_neither_closed_forms_nor_the_catalog_import_torch() -> None:
    program = (
        "import sys; from zerofit.estimate.closed_form import closed_form_log;"
        "from zerofit.estimate.time import estimate_step_time; from zerofit.probe.rates import catalog_rates;"
        "catalog_rates(); print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"
