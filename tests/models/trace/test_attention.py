"""Which attention kernel CUDA takes, and what it keeps: PyTorch's own operators, and published formulas."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tiny_traces import kept_bytes, run_once

from zerofit.core.allocation_log import TraceRequest
from zerofit.core.strategy import Precision
from zerofit.models.trace.attention import Kernel, attend, kernel_for

_SAMPLES, _LENGTH, _WIDTH = 3, 128, 256
_A100, _H100, _B200, _T4, _V100, _RTX_4090 = (8, 0), (9, 0), (10, 0), (7, 5), (7, 0), (8, 9)


@pytest.mark.parametrize(
    ("capability", "bits", "is_bf16", "head_dim", "has_mask", "dropout", "kernel"),
    [
        (_A100, 16, True, 128, False, 0.0, Kernel.FLASH),
        (_A100, 16, True, 128, True, 0.0, Kernel.EFFICIENT),
        (_A100, 16, False, 80, False, 0.1, Kernel.FLASH),
        (_A100, 32, False, 64, False, 0.0, Kernel.EFFICIENT),
        (_A100, 16, True, 288, False, 0.0, Kernel.EFFICIENT),
        (_A100, 16, True, 20, True, 0.0, Kernel.MATH),
        (_RTX_4090, 16, True, 256, False, 0.1, Kernel.EFFICIENT),
        (_RTX_4090, 16, True, 256, False, 0.0, Kernel.FLASH),
        (_H100, 16, True, 128, False, 0.0, Kernel.CUDNN),
        (_H100, 16, True, 128, True, 0.0, Kernel.CUDNN),
        (_H100, 16, True, 64, False, 0.1, Kernel.FLASH),
        (_H100, 16, True, 256, True, 0.0, Kernel.CUDNN),
        (_B200, 16, True, 256, True, 0.0, Kernel.EFFICIENT),
        (_T4, 16, False, 64, False, 0.0, Kernel.EFFICIENT),
        (_V100, 16, True, 64, False, 0.0, Kernel.MATH),
    ],
)
def test_the_kernel_that_cuda_takes(
    capability: tuple[int, int],
    bits: int,
    is_bf16: bool,
    head_dim: int,
    has_mask: bool,
    dropout: float,
    kernel: Kernel,
) -> None:
    taken = kernel_for(
        capability=capability,
        bits=bits,
        is_bf16=is_bf16,
        head_dim=head_dim,
        value_dim=head_dim,
        has_mask=has_mask,
        dropout=dropout,
    )
    assert taken is kernel


@pytest.mark.parametrize(
    ("capability", "head_dim", "value_dim", "has_mask", "shares_heads", "kernel"),
    [
        (_H100, 192, 128, False, False, Kernel.CUDNN),  # DeepSeek's latent attention
        (_B200, 192, 128, True, False, Kernel.CUDNN),
        (_B200, 192, 192, True, False, Kernel.EFFICIENT),
        (_A100, 192, 128, False, False, Kernel.EFFICIENT),
        (_A100, 128, 128, False, True, Kernel.FLASH),
        (_A100, 128, 128, True, True, Kernel.MATH),
        (_H100, 128, 128, True, True, Kernel.CUDNN),
    ],
)
def test_the_kernel_for_values_narrower_than_keys_and_for_shared_heads(
    capability: tuple[int, int],
    head_dim: int,
    value_dim: int,
    has_mask: bool,
    shares_heads: bool,
    kernel: Kernel,
) -> None:
    taken = kernel_for(
        capability=capability,
        bits=16,
        is_bf16=True,
        head_dim=head_dim,
        value_dim=value_dim,
        has_mask=has_mask,
        dropout=0.0,
        shares_heads=shares_heads,
    )
    assert taken is kernel


def _inputs(dtype: Any, key_heads: int = 4, device: str = "cpu", head_dim: int = 12) -> tuple[Any, Any, Any]:
    import torch

    shape = (2, 16, head_dim)
    return tuple(  # type: ignore[return-value]
        torch.zeros(2, heads, *shape[1:], dtype=dtype, device=device, requires_grad=True)
        for heads in (4, key_heads, key_heads)
    )


def _mask(kind: str | None, dtype: Any) -> Any:
    import torch

    seen = torch.ones(2, 1, 16, 16, dtype=torch.bool)
    return {"bool": seen, "float": seen.to(dtype)}.get(kind or "")


_CALLS = [(None, False, 4), (None, True, 4), ("float", False, 4), ("bool", False, 4), (None, True, 2)]
_PYTORCHS_OWN = "_scaled_dot_product_attention_math"


def _own_or_ours(is_own: bool, inputs: Any, mask: Any, is_causal: bool, dropout: float = 0.0) -> Any:
    import torch

    given: dict[str, Any] = {"is_causal": is_causal, "enable_gqa": True}
    if not is_own:
        return attend(*inputs, mask, dropout, capability=(7, 0), **given)
    if mask is not None and mask.dtype is torch.bool:
        hidden, seen = (torch.scalar_tensor(one, dtype=inputs[0].dtype) for one in (float("-inf"), 0.0))
        mask = torch.where(mask, seen, hidden)
    return getattr(torch.ops.aten, _PYTORCHS_OWN)(*inputs, mask, dropout, **given)[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize(("mask", "is_causal", "key_heads"), _CALLS)
def test_plain_attention_makes_what_pytorchs_own_does_in_the_same_order(
    dtype: str, mask: str | None, is_causal: bool, key_heads: int
) -> None:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    made: list[tuple[str, ...]] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            name = func._overloadpacket.__name__
            given = {one.untyped_storage()._cdata for one in args if isinstance(one, torch.Tensor)}
            is_new = isinstance(out, torch.Tensor) and out.untyped_storage()._cdata not in given
            if is_new and name != "add":  # under a mode PyTorch adds the mask out of place
                made.append((name, str(tuple(out.shape)), str(out.dtype)))
            return out

    told = []
    for is_own in (True, False):
        inputs = _inputs(getattr(torch, dtype), key_heads)
        given = _mask(mask, inputs[0].dtype)
        made.clear()
        with Watching():
            out = _own_or_ours(is_own, inputs, given, is_causal)
            torch.autograd.grad(out, inputs, torch.ones_like(out))
        told.append(list(made))
    assert len(told[0]) > 10
    assert told[0] == told[1]


def test_plain_attentions_dropout_keeps_a_boolean_mask_beside_fp32_weights() -> None:
    import torch

    kept: Counter[str] = Counter()

    def keep(tensor: Any) -> Any:
        if tensor.numel() == 2 * 4 * 16 * 16:
            kept[str(tensor.dtype)] += 1
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _own_or_ours(False, _inputs(torch.bfloat16), None, False, 0.1)
    assert kept == {"torch.float32": 2, "torch.bool": 1}


def test_autocast_leaves_plain_attention_in_fp32() -> None:
    import torch

    kept: set[str] = set()

    def keep(tensor: Any) -> Any:
        kept.add(str(tensor.dtype))
        return tensor

    query, key, value = _inputs(torch.float32)
    keeping = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with torch.autocast("cpu", torch.bfloat16), keeping:
        out = attend(query, key, value, capability=(7, 0))
    assert (out.dtype, kept) == (torch.bfloat16, {"torch.float32"})


@pytest.mark.parametrize("samples", [1, _SAMPLES])
def test_keys_that_all_samples_share_take_no_fused_kernel(samples: int) -> None:
    """Source: sdp_utils.cpp, check_batch_size_and_num_heads_dense."""
    import torch

    query = torch.ones(samples, 2, _LENGTH, 64, dtype=torch.bfloat16, requires_grad=True)
    shared = torch.ones(1, 2, 8, 64, dtype=torch.bfloat16)
    mask = torch.ones(_LENGTH, 8, dtype=torch.bool)
    with torch.device("meta"):
        query, shared, mask = (one.to("meta") for one in (query, shared, mask))
        out = attend(query, shared, shared, mask, capability=_A100)
    assert out.shape == query.shape
    assert ("Efficient" in type(out.grad_fn).__name__) == (samples == 1)


@pytest.mark.parametrize(
    ("capability", "dtype", "mask", "operator", "more"),
    [
        (_A100, "bfloat16", None, "flash", (0.0, True, False)),
        (_A100, "float16", None, "flash", (0.0, True, False)),
        (_A100, "float32", None, "efficient", (None, True, 0.0, True)),
        (_T4, "float16", None, "efficient", (None, True, 0.0, True)),
        (_H100, "bfloat16", None, "cudnn", (None, True, 0.0, True, False)),
    ],
)
def test_a_fused_kernel_on_fake_tensors_makes_what_pytorchs_meta_kernel_does(
    capability: tuple[int, int], dtype: str, mask: None, operator: str, more: tuple[Any, ...]
) -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    def told(tensor: Any) -> tuple[Any, ...]:
        return tuple(tensor.shape), tensor.dtype, tensor.stride()

    with FakeTensorMode():
        inputs = _inputs(getattr(torch, dtype), head_dim=16)
        out = attend(*inputs, mask, is_causal=True, capability=capability)
        name = out.grad_fn.name()
        ours = [told(out), *map(told, torch.autograd.grad(out, inputs, torch.ones_like(out)))]
    on_meta = _inputs(getattr(torch, dtype), device="meta", head_dim=16)
    made = getattr(torch.ops.aten, f"_scaled_dot_product_{operator}_attention")(*on_meta, *more)
    gradients = torch.autograd.grad(made[0], on_meta, torch.ones_like(made[0]))
    assert operator in name.lower()
    assert ours == [told(made[0]), *map(told, gradients)]


def _bytes_a_layer(attention: str) -> float:
    """Return what one more layer of GPT-2's kind keeps: bytes a token and channel."""
    request = TraceRequest(
        sequence_length=_LENGTH, is_padded=False, weights=Precision.FP16, attention=attention
    )
    two, three = (kept_bytes(run_once("gpt2-gelu", request, num_layers=layers)) for layers in (2, 3))
    return float(three - two) / (_SAMPLES * _LENGTH * _WIDTH)


def test_an_eager_layer_keeps_what_korthikanti_and_others_count() -> None:
    """sbh (34 + 5as/h): https://arxiv.org/abs/2205.05198, with a = 4 heads, s = 128, h = 256."""
    assert _bytes_a_layer("eager") == pytest.approx(34 + 5 * 4 * 128 / 256, rel=0.01)


def test_a_layer_with_flash_attention_keeps_no_scores() -> None:
    """34sbh, and 4abs for the sums of each row; two of the 34 are the score's output, kept in both."""
    assert _bytes_a_layer("sdpa") == pytest.approx(34 + 4 * 4 / 256, rel=0.01)
