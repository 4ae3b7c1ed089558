"""Layers of quantized checkpoints in a trace: what they hold, and what a pass with them allocates."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from tiny_traces import tiny

from zerofit.core.allocation_log import TraceRequest
from zerofit.core.strategy import Lora, Precision
from zerofit.models.trace.entry import trace_config
from zerofit.models.trace.packed_formats import packed_in, packed_int8, packs_in_8_bit, take_format
from zerofit.models.weight_formats import format_of

if TYPE_CHECKING:
    from zerofit.core.allocation_log import AllocationLog

_REQUEST = TraceRequest(
    sequence_length=16, is_padded=False, lora=Lora(rank=4, alpha=8), weights=Precision.BF16
)
_FORMATS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 16},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 16},
    "fp8": {"quant_method": "fp8", "weight_block_size": [16, 16]},
    "hqq": {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 16}}},
    "torchao": {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}},
}


def _log(name: str, said: dict[str, Any] | None, request: TraceRequest = _REQUEST) -> AllocationLog:
    config, build = tiny(name, 2)
    if said is not None:
        config.quantization_config = said
    return trace_config(config, build, request).logs[0]


@cache
def _plain() -> AllocationLog:
    return _log("llama", None)


def _held(log: AllocationLog) -> int:
    """Return the bytes of what does not train."""
    frozen = (one for one in log.parameters if not one.trains)
    return sum(one.num_elements * one.bytes_per_element for one in frozen) + sum(log.buffer_bytes)


_QUICK = ("nf4", "int8", "gptq")
"""Formats of bitsandbytes, and of integers with scales; the others are slow."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in _FORMATS]
)
def test_a_quantized_checkpoint_holds_its_own_bytes_and_trains_adapters_alone(name: str) -> None:
    form = format_of({"quantization_config": _FORMATS[name]})
    assert form is not None
    plain, packed = _plain(), _log("llama", _FORMATS[name])
    widths = {"int8": 1, "uint8": 1, "float16": 2, "float32": 4, "int32": 4}
    layer = ((32, 32), (16, 32), (16, 32), (32, 32), (48, 32), (48, 32), (32, 48))  # 4 heads, 2 of keys
    wide = 2 * sum(2 * rows * columns for rows, columns in layer)
    own = 2 * sum(
        tensor.num_elements * widths[tensor.dtype] for shape in layer for tensor in form.stored(*shape)
    )
    assert _held(plain) - _held(packed) == wide - own
    assert sum(one.is_packed for one in packed.parameters) == 2 * len(layer)
    trained = [one.name for one in packed.parameters if one.trains]
    assert trained
    assert all(".lora_" in one for one in trained)


@pytest.mark.parametrize(
    ("kept", "num_packed", "packs_head"),
    [
        pytest.param(
            None, 14, False, marks=pytest.mark.slow
        ),  # transformers' default: all linear layers but the head
        (["lm_head", "down_proj"], 12, False),
        pytest.param(["model.layers.1"], 8, True, marks=pytest.mark.slow),
    ],
)
def test_modules_that_a_checkpoint_keeps_wide_stay_wide(
    kept: list[str] | None, num_packed: int, packs_head: bool
) -> None:
    said = {"load_in_8bit": True, "llm_int8_skip_modules": kept}
    packed = {one.name for one in _log("llama", said).parameters if one.is_packed}
    assert len(packed) == num_packed
    assert any("lm_head" in one for one in packed) is packs_head


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mxfp4", "compressed-tensors"])
def test_a_checkpoint_that_is_unpacked_is_as_wide_as_before(method: str) -> None:
    assert _log("gpt-oss", {"quant_method": method}) == _log("gpt-oss", None)


def test_bitsandbytes_int8_is_packed_as_its_own_layer() -> None:
    import bitsandbytes
    import torch

    own = bitsandbytes.nn.Linear8bitLt(64, 48, bias=True, has_fp16_weights=False, threshold=6.0).to("cpu")
    assert packs_in_8_bit(own)
    assert not packs_in_8_bit(torch.nn.Linear(4, 4))
    made = packed_int8(own, own.bias.data)
    real = own.weight
    held = made.weight.nbytes, *(buffer.nbytes for buffer in made.buffers())
    assert held == (real.data.nbytes, real.SCB.nbytes)
    assert made.weight.packs_weights


@pytest.mark.parametrize(
    ("name", "keeps_input", "keeps_weight"),
    [
        ("nf4", False, False),
        ("int8", True, False),
        ("gptq", False, True),
        ("awq", True, False),
        ("fp8", False, False),
        ("hqq", True, False),
        ("torchao", False, True),
    ],
)
def test_a_product_keeps_for_its_backward_pass_what_its_library_keeps(
    name: str, keeps_input: bool, keeps_weight: bool
) -> None:
    import torch

    form = format_of({"quantization_config": _FORMATS[name]})
    assert form is not None
    layer = packed_in(torch.nn.Linear(256, 512, bias=False, dtype=torch.bfloat16), form)
    kept: list[int] = []

    def pack(tensor: Any) -> Any:
        kept.append(tensor.nbytes)
        return tensor

    given = torch.zeros(2, 8, 256, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(given.clone())
    assert (2 * 256 * 512 in kept) is keeps_weight
    node = output.grad_fn
    while node is not None and not hasattr(node, "packed") and node.next_functions:
        node = node.next_functions[0][0]
    assert (getattr(node, "kept", None) is not None) is keeps_input
    output.sum().backward()
    assert given.grad is not None
    assert given.grad.shape == given.shape


def test_a_format_is_taken_off_a_configuration_once() -> None:
    config, _ = tiny("llama", 1)
    config.quantization_config = _FORMATS["gptq"]
    found = take_format(config)
    assert found is not None
    assert found.method == "gptq"
    assert not hasattr(config, "quantization_config")
    assert take_format(config) is None
