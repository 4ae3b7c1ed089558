"""Quantized layers of a trace against bitsandbytes' own: bytes at rest, and what a pass allocates."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from allocator_counts import PLAIN, SAMPLES, composed, counted, counted_in
from tiny_traces import tiny

from zerofit.core.allocation_log import Packing, TraceRequest
from zerofit.core.facts import ModelFacts
from zerofit.core.strategy import Lora, Precision, Quantization
from zerofit.models.changes.adapters import adapt
from zerofit.models.changes.quantization import quantization_config, whole_heads
from zerofit.models.trace.entry import describe, trace_config
from zerofit.models.trace.live import prepare_live
from zerofit.models.trace.packed import packed_as, packed_like
from zerofit.models.trace.prepare import prepare_model
from zerofit.models.trace.run import run_micro_batch
from zerofit.planning.estimate.closed_form.shape import Shape

if TYPE_CHECKING:
    from pathlib import Path


_LORA = Lora(rank=4, alpha=8)
_REQUEST = TraceRequest(
    sequence_length=PLAIN.sequence_length, is_padded=False, lora=_LORA, quantization=Quantization.NF4
)
_NAMES = ["llama", "bert", "gpt2"]


def _real(config: Any, build: Any, folder: Path) -> Any:
    """Return the model as a run has it: saved, loaded in nf4, and adapted."""
    build(config).save_pretrained(folder)
    with whole_heads():
        model = build.__self__.from_pretrained(
            folder, quantization_config=quantization_config(Precision.FP32), device_map={"": "cpu"}
        )
    return adapt(model, _LORA, quantization=Quantization.NF4).train()


def _states(model: Any) -> dict[int, int]:
    """Return the bytes of all tensors that bitsandbytes keeps beside packed weights, by where they lie."""
    found: dict[int, int] = {}
    for module in model.modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is None:
            continue
        tensors = (state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)
        found |= {one.data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return found


@pytest.mark.parametrize("name", _NAMES)
def test_a_quantized_base_takes_the_bytes_of_bitsandbytes(tmp_path: Path, name: str) -> None:
    config, build = tiny(name, 2)
    real = _real(config, build, tmp_path)
    made = describe(prepare_model(build, config, _REQUEST))
    own = {
        parameter_name: (one.numel(), one.element_size(), one.requires_grad)
        for parameter_name, one in real.named_parameters()
    }
    assert {one.name: (one.num_elements, one.bytes_per_element, one.trains) for one in made.parameters} == own
    assert any(one.is_packed for one in made.parameters)
    buffers = sum(one.untyped_storage().nbytes() for one in real.buffers())
    assert sum(made.buffer_bytes) - buffers == sum(_states(real).values())


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_quantized_base_allocates_what_bitsandbytes_does(tmp_path: Path, name: str) -> None:
    config, build = tiny(name, 3)
    peak, end = counted(_real(config, build, tmp_path), 1)
    model = prepare_model(build, config, _REQUEST)
    log = run_micro_batch(model, describe(model), SAMPLES, _REQUEST, as_on_cuda=False)
    assert composed(log, 1)[1] == end
    assert composed(log, 1)[0] == pytest.approx(peak, rel=0.02)


def test_an_own_quantized_base_is_copied_with_its_bytes(tmp_path: Path) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    config, build = tiny("llama", 2)
    real = _real(config, build, tmp_path)
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = describe(prepare_live(real, TraceRequest(sequence_length=PLAIN.sequence_length)))
    own = {
        name: (one.numel(), one.element_size(), one.requires_grad) for name, one in real.named_parameters()
    }
    assert {one.name: (one.num_elements, one.bytes_per_element, one.trains) for one in made.parameters} == own
    buffers = sum(one.untyped_storage().nbytes() for one in real.buffers())
    assert sum(made.buffer_bytes) - buffers == sum(_states(real).values())


@pytest.mark.slow
def test_a_model_of_which_nothing_is_quantized_is_said_to_be_so() -> None:
    request = replace(_REQUEST, sequence_length=8, lora=Lora(rank=4, target_modules=("query_key_value",)))
    trace = trace_config(*tiny("falcon", 1), request)
    assert not any(one.is_packed for one in trace.logs[0].parameters)
    assert trace.notes == (
        "nf4 quantizes nothing of this model: transformers replaces torch's Linear and its own Conv1D, "
        "and the model's linear layers are of other classes (FalconLinear)",
    )
    assert trace_config(*tiny("llama", 1), _REQUEST).notes == ()


def test_experts_that_stay_wide_in_a_quantized_model_are_said() -> None:
    trace = trace_config(*tiny("mixtral", 2), replace(_REQUEST, sequence_length=8))
    experts = 2 * 4 * 3 * 32 * 48  # layers, experts, matrices
    attention = 2 * (2 * 32 * 32 + 2 * 32 * 16)
    assert trace.notes == (
        f"{experts:,} weights of experts count as wide as before quantization, and {attention:,} weights are "
        "packed: transformers 5 stores a layer's experts in one tensor, which is no linear layer",
    )


@pytest.mark.slow
def test_a_weight_that_was_packed_in_another_format_is_unpacked_to_it_and_then_cast() -> None:
    import bitsandbytes
    import torch

    own = bitsandbytes.nn.Linear4bit(
        1024, 4096, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4", quant_storage=torch.uint8
    )
    own = own.to(torch.float16).to("cpu").train()  # packed as it moves to its device
    assert own.weight.quant_state.dtype is torch.float16

    def peak_of(layer: Any) -> int:
        inputs = torch.ones(2, 61, 1024, dtype=torch.bfloat16, requires_grad=True)
        return counted_in(lambda: layer(inputs).sum().backward(), layer)[0]

    whole = 1024 * 4096 * 2
    real = peak_of(own)
    assert peak_of(packed_as(own, None)) == pytest.approx(real, rel=0.02)
    assert real > 2 * whole


def test_the_closed_form_of_a_matrix_in_4_bits_is_what_its_layer_holds_but_for_its_tables() -> None:
    import torch
    from torch import nn

    with torch.device("meta"):
        layer = packed_like(nn.Linear(4096, 11008, bias=False), Packing())
    held = sum(one.nbytes for one in (*layer.parameters(), *layer.buffers()))

    facts = ModelFacts(
        name="any",
        model_type="llama",
        num_parameters=1,
        num_trainable_parameters=1,
        num_layers=1,
        hidden_size=1,
        vocab_size=1,
    )
    tables = 16 * 4 + 256 * 4 + 4  # what 4 and 8 bits stand for, and the mean of the scales
    assert Shape(facts=facts, request=_REQUEST).packed_bytes(4096 * 11008) == held - tables
