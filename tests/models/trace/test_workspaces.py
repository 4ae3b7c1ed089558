"""Memory of CUDA kernels beside their outputs."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_traces import run_once

from zerofit.core.allocation_log import TensorKind, TraceRequest
from zerofit.core.strategy import Precision
from zerofit.models.trace.workspaces import scratch_bytes, stored_bytes

_LOW = TraceRequest(sequence_length=16, is_padded=False, weights=Precision.BF16)


def _shaped(heads: int, dtype: str = "bfloat16") -> Any:
    import torch

    return torch.empty(2, heads, 100, 40, dtype=getattr(torch, dtype), device="meta")


@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
@pytest.mark.parametrize(("key_heads", "more"), [(4, ()), (2, (2 * 2 * 4 * 100 * 40,) * 2)])
def test_backward_through_attention_takes_fp32_sums_of_rows_and_of_the_query(
    kernel: str, key_heads: int, more: tuple[int, ...]
) -> None:
    import torch

    function = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention_backward").default
    taken = scratch_bytes(function, (_shaped(4), _shaped(4), _shaped(key_heads), _shaped(key_heads)))
    assert taken == (4 * 2 * 4 * 128, 4 * 2 * 4 * 128 * 64, *more)


def test_safe_softmax_takes_its_scores_once_more_and_their_mask() -> None:
    import torch

    function = torch.ops.aten._safe_softmax.default
    number = 2 * 4 * 100 * 40
    assert scratch_bytes(function, (_shaped(4, "float32"), -1)) == (4 * number, number, number // 40)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_an_h100_takes_no_less_scratch_for_attention_than_an_a100(capability: tuple[int, int]) -> None:
    request = TraceRequest(
        sequence_length=16, is_padded=False, weights=Precision.BF16, compute_capability=capability
    )
    log = run_once("llama", request, num_layers=1)
    attention = [
        num_bytes
        for kind, num_bytes, operator in zip(log.kinds, log.num_bytes, log.operators, strict=True)
        if kind is TensorKind.WORKSPACE and "attention" in log.operator_names[operator]
    ]
    heads = 3 * 4
    assert attention == [4 * heads * 128, 4 * heads * 128 * 32, *[2 * heads * 16 * 8] * 2]


@pytest.mark.parametrize("length", [16, 24, 32])
def test_the_gradient_of_a_bias_has_rows_of_a_multiple_of_16(length: int) -> None:
    import torch

    whole = torch.empty(2, 3, 5, -(-length // 16) * 16)
    backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    for seen in (whole[..., :length], whole[..., :length].contiguous()):
        assert stored_bytes(backward, 3, seen) == whole.numel() * 4
