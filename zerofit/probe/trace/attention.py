"""Scaled-dot-product attention as CUDA runs it: which kernel takes the call, and what it allocates.

Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (priority_order and the can_use_* conditions) and
aten/src/ATen/native/transformers/attention.cpp (scaled_dot_product_attention).
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any


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
    """Return the kernel that PyTorch's CUDA build takes for one call with gradients.

    cuDNN comes first on compute capability 9.x and 10.x, as in builds with cuDNN later than 9.15.0; older
    builds take flash there. With neither mask nor dropout both allocate the same outputs.

    Args:
        bits: of one element of the query.
        is_square: whether there are as many keys as queries.
        shares_heads: whether enable_gqa gives several query heads one key head.
    """
    is_new = capability >= (8, 0)
    is_low = bits == 16 and (is_new or not is_bf16)
    same_dim = head_dim == value_dim
    cudnn_dims = head_dim % 8 == 0 and value_dim % 8 == 0 and max(head_dim, value_dim) <= 128
    if capability[0] in (9, 10) and is_low and cudnn_dims and (dropout * 16).is_integer():
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

    if torch.is_autocast_cpu_enabled():
        low = torch.get_autocast_dtype("cpu")
        query, key, value, attn_mask = (
            tensor.to(low) if tensor is not None and tensor.dtype == torch.float32 else tensor
            for tensor in (query, key, value, attn_mask)
        )
    kernel = kernel_for(
        capability=capability,
        bits=8 * query.element_size(),
        is_bf16=query.dtype == torch.bfloat16,
        head_dim=query.shape[-1],
        value_dim=value.shape[-1],
        has_mask=attn_mask is not None,
        dropout=dropout_p,
        is_square=query.shape[2] == key.shape[2],
        is_causal=is_causal,
        shares_heads=query.shape[1] != key.shape[1],
    )
    if query.dim() != 4:
        kernel = Kernel.MATH
    if attn_mask is not None and attn_mask.dtype == torch.bool and kernel is not Kernel.FLASH:
        attn_mask = _as_bias(attn_mask, query.dtype)
    if kernel is Kernel.MATH:
        return _math(query, key, value, attn_mask, dropout_p, is_causal, scale)
    return _FUSED[kernel](query, key, value, attn_mask, dropout_p, is_causal, scale)


def _as_bias(mask: Any, dtype: Any) -> Any:
    """Return a boolean mask as what is added to the scores (convert_boolean_attn_mask)."""
    import torch

    bias = torch.zeros_like(mask, dtype=dtype)
    return bias.masked_fill_(mask.logical_not(), -math.inf)


def _cudnn(q: Any, k: Any, v: Any, bias: Any, dropout: float, is_causal: bool, scale: float | None) -> Any:
    import torch

    kernel = torch.ops.aten._scaled_dot_product_cudnn_attention
    return kernel(q, k, v, bias, True, dropout, is_causal, False, scale=scale)[0]


def _flash(q: Any, k: Any, v: Any, _: Any, dropout: float, is_causal: bool, scale: float | None) -> Any:
    """Pad the heads to a multiple of 8, as pad_last_dim does."""
    import torch

    head_dim = q.shape[-1]
    padding = -head_dim % 8
    if padding:
        scale = 1 / math.sqrt(head_dim) if scale is None else scale
        q, k, v = (torch.nn.functional.pad(tensor, (0, padding)) for tensor in (q, k, v))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    out = kernel(q, k, v, dropout, is_causal, False, scale=scale)[0]
    return out[..., :head_dim] if padding else out


def _efficient(
    q: Any, k: Any, v: Any, bias: Any, dropout: float, is_causal: bool, scale: float | None
) -> Any:
    """Lay the mask's rows out on multiples of 16 elements (preprocess_mask, pad_bias)."""
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


def _math(q: Any, k: Any, v: Any, bias: Any, dropout: float, is_causal: bool, scale: float | None) -> Any:
    """Do what _scaled_dot_product_attention_math does, step by step."""
    import torch

    if q.shape[-3] != k.shape[-3]:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
    if is_causal:
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        bias = _as_bias(seen, q.dtype)
    root = math.sqrt(1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    scores = (q * root) @ (k * root).transpose(-2, -1)
    if bias is not None:
        scores = scores.add_(bias)
    weights = torch.softmax(scores, -1)
    if dropout > 0:
        weights = torch.native_dropout(weights, dropout, True)[0]
    return weights @ v


_FUSED = {Kernel.CUDNN: _cudnn, Kernel.FLASH: _flash, Kernel.EFFICIENT: _efficient}
