"""Scaled-dot-product attention as on CUDA: the kernel chosen for a call, and its allocations.

Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (priority_order and the can_use_* conditions) and
aten/src/ATen/native/transformers/attention.cpp (scaled_dot_product_attention). The choice is PyTorch 2.13's,
before https://github.com/pytorch/pytorch/pull/191085 (the efficient kernel supports grouped-query attention)
and https://github.com/pytorch/pytorch/pull/185553 (cuDNN supports 256 channels on 10.x too). Whether 2.13 has
the latter is an ASSUMPTION: allocations differ only with a mask or dropout.
"""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from zerofit.core.errors import UserError
from zerofit.core.strategy import Precision
from zerofit.core.upstream.transformers import flash_attention_from
from zerofit.models.trace.prepare import attribute_replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerofit.core.allocation_log import TraceRequest


class Kernel(StrEnum):
    """PyTorch's implementations of attention on CUDA."""

    CUDNN = "cudnn"
    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"


def kernel_for(
    *,
    capability: tuple[int, int],
    bits: int,
    is_bf16: bool,
    head_dim: int,
    value_dim: int,
    has_mask: bool,
    dropout: float,
    is_square: bool = True,
    is_causal: bool = False,
    shares_heads: bool = False,
) -> Kernel:
    """Return the kernel that PyTorch's CUDA build uses for one call with gradients.

    cuDNN comes first on compute capability 9.x and 10.x, as in builds with cuDNN newer than 9.15.0; older
    builds use flash there. Without mask and dropout both allocate the same outputs.

    Args:
        bits: per element of the query.
        is_square: whether there are as many keys as queries.
        shares_heads: whether enable_gqa gives several query heads one key head. transformers uses it only
            without a mask, and repeats the key heads otherwise (integrations/sdpa_attention.py).
    """
    is_new = capability >= (8, 0)
    is_low = bits == 16 and (is_new or not is_bf16)
    same_dim = head_dim == value_dim
    takes_dims = _cudnn_takes(capability, head_dim, value_dim)
    if capability[0] in (9, 10) and is_low and takes_dims and (dropout * 16).is_integer():
        return Kernel.CUDNN
    is_small_chip = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
    dim_trains = head_dim <= 192 or not is_small_chip or (not dropout and head_dim > 224)
    fits_flash = same_dim and head_dim <= 256 and dim_trains and (is_square or not is_causal)
    if is_new and is_low and not has_mask and fits_flash:
        return Kernel.FLASH
    alignment = 8 if bits == 16 and capability >= (7, 0) else 4 if is_new else 1
    is_aligned = head_dim % alignment == 0 and value_dim % alignment == 0
    if (is_low or bits == 32) and is_aligned and not shares_heads:
        return Kernel.EFFICIENT
    return Kernel.MATH


def _cudnn_takes(capability: tuple[int, int], head_dim: int, value_dim: int) -> bool:
    """Return True if cuDNN supports these head sizes; (192, 128) is DeepSeek's latent attention.

    Source: check_cudnn_tensor_shapes.
    """
    if head_dim % 8 or value_dim % 8:
        return False
    most = 256 if capability == (9, 0) else 128
    return max(head_dim, value_dim) <= most or (head_dim, value_dim) == (192, 128)


def attend(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    capability: tuple[int, int],
) -> Any:
    """Do what scaled_dot_product_attention does on a CUDA device of this compute capability."""
    import torch

    if torch.is_autocast_enabled("cpu"):
        low = torch.get_autocast_dtype("cpu")
        query, key, value, attn_mask = (
            tensor.to(low) if tensor is not None and tensor.dtype == torch.float32 else tensor
            for tensor in (query, key, value, attn_mask)
        )
    shares_heads = query.shape[-3] != key.shape[-3]
    kernel = kernel_for(
        capability=capability,
        bits=8 * query.element_size(),
        is_bf16=query.dtype == torch.bfloat16,
        head_dim=query.shape[-1],
        value_dim=value.shape[-1],
        has_mask=attn_mask is not None,
        dropout=dropout_p,
        is_square=query.shape[-2] == key.shape[-2],
        is_causal=is_causal,
        shares_heads=shares_heads,
    )
    shares_keys = query.shape[0] != key.shape[0]  # check_batch_size_and_num_heads_dense
    if query.dim() != 4 or shares_keys or (shares_heads and not enable_gqa):
        kernel = Kernel.MATH
    with torch.autocast("cpu", enabled=False):  # CUDA's autocast is also off within the call
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = _as_bias(attn_mask, query.dtype)
        if kernel is Kernel.MATH:
            return plain_kernel(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return _FUSED[kernel](query, key, value, attn_mask, dropout_p, is_causal, scale)


def _as_bias(mask: Any, dtype: Any) -> Any:
    """Return a boolean mask as additive bias (convert_boolean_attn_mask)."""
    import torch

    hidden, seen = (torch.scalar_tensor(value, dtype=dtype, device=mask.device) for value in (-math.inf, 0.0))
    return torch.where(mask, seen, hidden)


def _cudnn(q: Any, k: Any, v: Any, bias: Any, dropout: float, is_causal: bool, scale: float | None) -> Any:
    import torch

    kernel = torch.ops.aten._scaled_dot_product_cudnn_attention
    return kernel(q, k, v, bias, True, dropout, is_causal, False, scale=scale)[0]


def flash_kernel(
    q: Any,
    k: Any,
    v: Any,
    _: Any,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    *,
    window: int | None = None,
) -> Any:
    """Pad the heads to a multiple of 8, as pad_last_dim does.

    Args:
        window: tokens that a query sees on each side of its own; None for all.
    """
    import torch

    head_dim = q.shape[-1]
    padding = -head_dim % 8
    if padding:
        scale = 1 / math.sqrt(head_dim) if scale is None else scale
        q, k, v = (torch.nn.functional.pad(tensor, (0, padding)) for tensor in (q, k, v))
    _WINDOWS.pop(q.untyped_storage(), None)  # of an earlier call
    if window is not None:
        _WINDOWS[q.untyped_storage()] = window
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    out = kernel(q, k, v, dropout, is_causal, False, scale=scale)[0]
    return out[..., :head_dim] if padding else out


def _efficient(
    q: Any, k: Any, v: Any, bias: Any, dropout: float, is_causal: bool, scale: float | None
) -> Any:
    """Align the mask's rows to multiples of 16 elements (preprocess_mask, pad_bias)."""
    import torch

    if bias is not None:
        if bias.dim() == 2:
            bias = bias[None, None]
        width = bias.shape[-1]
        if width % 16:
            bias = torch.nn.functional.pad(bias, (0, 16 - width % 16))[..., :width]
        bias = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    return kernel(q, k, v, bias, True, dropout, is_causal, scale=scale)[0]


def plain_kernel(
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool = False,
) -> Any:
    """Do what _scaled_dot_product_attention_math does, step by step; 16-bit inputs are computed in fp32.

    The operator itself behaves differently: under a dispatch mode it adds the mask out of place, and on the
    CPU its dropout keeps a scaled fp32 mask. Named variables here live until the end, as there.
    """
    import torch

    dtype = q.dtype
    q, k, v = (
        tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor for tensor in (q, k, v)
    )
    root = math.sqrt(1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    scaled = q * root
    if is_causal:
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        bias = _as_bias(seen, q.dtype)
        del seen
    whole_k, whole_v = k, v
    if enable_gqa and q.shape[-3] != k.shape[-3]:
        whole_k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        whole_v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
    weights = scaled @ (whole_k.transpose(-2, -1) * root)
    if bias is not None:
        weights = weights.add_(bias)
    weights = torch.ops.aten._safe_softmax(weights, -1)
    if dropout > 0:
        weights = torch.native_dropout(weights, dropout, True)[0]
    returned = weights.to(dtype)  # the operator's second output, freed at its end
    out = (weights @ whole_v).to(dtype)
    del returned
    return out


_FUSED: dict[Kernel, Callable[..., Any]] = {
    Kernel.CUDNN: _cudnn,
    Kernel.FLASH: flash_kernel,
    Kernel.EFFICIENT: _efficient,
}


_PREFIX = "flash_attention_"
_LEAST_CAPABILITY = {"flash_attention_2": (8, 0), "flash_attention_3": (9, 0)}
"""Source: https://github.com/Dao-AILab/flash-attention, README: Ampere for version 2, Hopper for 3."""


_WINDOWS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Tokens that a query of a sliding window sees on each side of its own, by the storage of the queries."""


def seen_share(query: Any, *, is_causal: bool) -> tuple[int, int]:
    """Return how many of the scores a flash kernel computes, and of how many, for a query."""
    tokens, window = int(query.shape[-2]), _WINDOWS.get(query.untyped_storage())
    if window is None:
        return 1, 2 if is_causal else 1
    side = window * tokens - window * (window + 1) // 2
    return tokens + (side if is_causal else 2 * side), tokens**2


@contextmanager
def flash_package(request: TraceRequest) -> Iterator[None]:
    """Provide flash-attn's functions to transformers if a request needs them; they accept fake tensors.

    A padded batch goes through transformers' unpadding. The amount of padding is unknown: no tokens are
    removed, which gives an upper bound. Version 3 is assumed to allocate what 2 does, and samples are never
    packed into one (ASSUMPTIONS).

    Raises:
        UserError: flash-attn does not support the GPU or the precision.
    """
    if not (request.attention or "").startswith(_PREFIX):
        yield
        return
    _check_flash(request)
    with ExitStack() as stack:
        for holder, name, value in flash_attention_from(_flash, _flash_varlen):
            stack.enter_context(attribute_replaced(holder, name, value))
        yield


def _check_flash(request: TraceRequest) -> None:
    least = _LEAST_CAPABILITY.get(request.attention or "", (8, 0))
    if request.compute_capability < least:
        raise UserError(
            "flash-attention-needs-newer-gpu",
            "the GPU is too old for this attention",
            found=f"attention {request.attention}, compute capability "
            f"{'.'.join(map(str, request.compute_capability))}",
            why=f"its kernels need {'.'.join(map(str, least))} and later",
            fix="keep sdpa: PyTorch uses its best kernel for the GPU",
        )
    if request.weights is Precision.FP32 and request.autocast is None:
        raise UserError(
            "flash-attention-needs-16-bit",
            "this attention does not support fp32",
            found=f"attention {request.attention}, fp32 without autocast",
            why="flash-attn only has kernels for fp16 and bf16",
            fix="train in bf16 or fp16, or keep sdpa",
        )


def _flash(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> Any:
    """Attend: (samples, tokens, heads, channels) in and out."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
    window = window_size[0] if 0 <= window_size[0] < q.shape[1] - 1 else None
    out = flash_kernel(query, key, value, None, dropout_p, causal, softmax_scale, window=window)
    return out.transpose(1, 2)


def _flash_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> Any:
    """Attend: (tokens of all samples, heads, channels) in and out."""
    samples = cu_seqlens_q.numel() - 1
    query, key, value = (tensor.view(samples, -1, *tensor.shape[1:]) for tensor in (q, k, v))
    return _flash(query, key, value, dropout_p, softmax_scale, causal, window_size).flatten(0, 1)
