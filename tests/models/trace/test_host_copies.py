"""Offloaded activations in a trace: what real training stores on the host leaves the GPU, and is copied."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from tiny_traces import kept_bytes, run_once, tiny
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from transformers import Qwen3Config, Qwen3ForCausalLM

from zerofit.core.allocation_log import CostKind, Pass, TensorKind, TraceRequest
from zerofit.core.strategy import Lora, Precision
from zerofit.core.units import MIB
from zerofit.models.changes.checkpointing import set_checkpointing
from zerofit.models.trace.batches import make_batch
from zerofit.models.trace.entry import trace_config
from zerofit.models.trace.prepare import attribute_replaced

_KEPT = TraceRequest(sequence_length=16, is_padded=False, gradient_checkpointing=True)
_MOVED = replace(_KEPT, activation_offload=True)
_SAMPLES = 3


@contextmanager
def _spied() -> Iterator[list[int]]:
    """Yield the bytes of each tensor that torch's save_on_cpu gets in real training."""
    packed: list[int] = []

    def pack(tensor: Any) -> Any:
        packed.append(tensor.numel() * tensor.element_size())
        return tensor

    def init(self: Any, *_: Any, **__: Any) -> None:
        saved_tensors_hooks.__init__(self, pack, lambda tensor: tensor)

    with attribute_replaced(save_on_cpu, "__init__", init):
        yield packed


def _copies(log: Any, during: Pass) -> list[int]:
    return [call.num_bytes for call in log.calls if (call.kind, call.during) == (CostKind.HOST_COPY, during)]


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5", "mixtral"])
def test_a_trace_copies_what_real_training_stores_on_the_host(name: str, every: int) -> None:
    request = replace(_MOVED, checkpoint_every=every)
    config, build = tiny(name, 4)
    model = build(config).train()
    set_checkpointing(model, wanted=True, every=every, offload=True)
    with _spied() as packed:
        model(**make_batch(model, _SAMPLES, request)).loss.backward()
    traced = run_once(name, request, num_layers=4, samples=_SAMPLES)
    assert packed
    assert _copies(traced, Pass.FORWARD) == packed
    assert sorted(_copies(traced, Pass.BACKWARD)) == sorted(packed)


def test_a_trace_frees_what_was_published() -> None:
    # 194.1 MB were left after the forward pass on an H100, and with offload 66.1 MB:
    # https://github.com/huggingface/transformers/pull/48444
    config = Qwen3Config(
        num_hidden_layers=8,
        hidden_size=1024,
        intermediate_size=3072,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=8,
    )
    long = replace(_MOVED, sequence_length=8192, weights=Precision.BF16)
    log = trace_config(config, Qwen3ForCausalLM._from_config, long).log_for(1)
    moved = [cost for cost in log.costs if (cost.kind, cost.during) == (CostKind.HOST_COPY, Pass.FORWARD)]
    assert sum(cost.count * (cost.fixed_bytes + cost.bytes_per_sample) for cost in moved) == 128.0 * MIB


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "mixtral", "t5"])
def test_the_gpu_no_longer_keeps_what_is_on_the_host(name: str) -> None:
    kept, moved = (run_once(name, request, num_layers=4) for request in (_KEPT, _MOVED))
    on_host, freed = sum(_copies(moved, Pass.FORWARD)), kept_bytes(kept) - kept_bytes(moved)
    if name == "t5":  # each block of the decoder stores the encoder's output and the biases again
        assert 0 < freed < on_host
    else:
        assert freed == on_host


def test_what_returns_is_allocated_again_until_its_block_is_recomputed() -> None:
    log = run_once("llama", _MOVED, num_layers=4)
    sizes = _copies(log, Pass.BACKWARD)
    again = [
        size
        for size, kind, operator in zip(log.num_bytes, log.kinds, log.operators, strict=True)
        if kind is TensorKind.RECOMPUTED and log.operator_names[operator] == "aten.clone.default"
    ]
    assert [size for size in again if size in sizes][: len(sizes)] == sizes


def test_the_scripts_own_save_on_cpu_is_traced_alike() -> None:
    config, build = tiny("llama", 4)

    def own(*args: Any, **kwargs: Any) -> Any:
        model = build(*args, **kwargs)
        forward = model.forward

        def on_host(*given: Any, **named: Any) -> Any:
            with save_on_cpu(pin_memory=True):
                return forward(*given, **named)

        model.forward = on_host
        return model

    plain = TraceRequest(sequence_length=16, is_padded=False)
    before, after = (trace_config(config, make, plain) for make in (build, own))
    costs = [cost for cost in after.logs[0].costs if cost.kind is CostKind.HOST_COPY]
    assert not any(cost.kind is CostKind.HOST_COPY for cost in before.logs[0].costs)
    assert {cost.during for cost in costs} == {Pass.FORWARD, Pass.BACKWARD}


def test_replicated_layers_copy_as_all_layers_do() -> None:
    config, build = tiny("llama", 8)
    short, whole = (
        trace_config(config, build, _MOVED, all_layers=all_layers).log_for(4) for all_layers in (False, True)
    )
    assert (short.codes, short.storages) == (whole.codes, whole.storages)
    assert {*short.costs} == {*whole.costs}


def test_adapters_on_frozen_weights_move_their_inputs_too() -> None:
    adapted = replace(_MOVED, lora=Lora(rank=4, target_modules=("q_proj", "v_proj")))
    log = run_once("llama", adapted, num_layers=4)
    assert len(_copies(log, Pass.FORWARD)) == 4
