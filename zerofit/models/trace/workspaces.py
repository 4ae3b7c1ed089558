"""Workspaces of CUDA kernels, and outputs whose dtype differs from the CPU's."""

from __future__ import annotations

from typing import Any

_FP32_BYTES, _INT64_BYTES = 4, 8


def scratch_bytes(function: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the sizes of the scratch blocks that an operator's CUDA kernel allocates while it runs.

    cuBLAS's workspace is not included, since it persists. cuDNN's workspace for convolutions is unknown, and
    left out.
    """
    rule = _SCRATCH.get(function.__name__)
    return rule(args) if rule else ()


def stored_bytes(function: Any, position: int, tensor: Any) -> int:
    """Return the size of one output's storage as allocated by the CUDA kernel."""
    if position and function.__name__ in _FP32_STATISTICS:
        return int(tensor.numel()) * _FP32_BYTES
    if position == _BIAS and function.__name__ == _EFFICIENT_BACKWARD:
        rows, length = tensor.numel() // max(1, tensor.shape[-1]), tensor.shape[-1]
        return int(rows * _round_up(length, _BIAS_ALIGNMENT) * tensor.element_size())
    return int(tensor.untyped_storage().nbytes())


_FP32_STATISTICS = {"native_layer_norm.default", "native_group_norm.default"}
"""CUDA stores mean and rstd in fp32 where the CPU uses the input's dtype.

Source: torch/_refs/__init__.py, native_layer_norm; aten/src/ATen/native/cuda/layer_norm_kernel.cu.
"""
_EFFICIENT_BACKWARD = "_scaled_dot_product_efficient_attention_backward.default"
_BIAS, _BIAS_ALIGNMENT = 3, 16
"""Its fourth output, the gradient of the bias, has rows of a multiple of 16 elements, which a cached fake
tensor of an earlier call lacks. Source: torch/_meta_registrations.py,
meta__scaled_dot_product_efficient_backward."""


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _flash_backward(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return softmax_d and dq_accum in fp32, and with grouped-query attention dk and dv of all query heads.

    Source: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd.
    """
    query, key = args[1], args[2]
    batch, heads, length, dim = query.shape
    rows, columns = _round_up(length, 128), _round_up(dim, 64 if dim > 128 else 32)
    sizes = [_FP32_BYTES * batch * heads * rows, _FP32_BYTES * batch * heads * rows * columns]
    if key.shape[1] != heads:
        sizes += [query.element_size() * batch * heads * key.shape[2] * dim] * 2
    return tuple(sizes)


def _safe_softmax(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the softmax before fully masked rows are zeroed, the -inf mask of scores, and these rows.

    Source: aten/src/ATen/native/transformers/attention.cpp, _safe_softmax.
    """
    scores = args[0]
    number = int(scores.numel())
    return scores.element_size() * number, number, number // max(int(scores.shape[-1]), 1)


def _efficient_backward(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return delta in fp32, and for 16-bit inputs fp32 sums of the query's gradient.

    Source: aten/src/ATen/native/transformers/cuda/attention_backward.cu, _efficient_attention_backward. The
    sums are an ASSUMPTION: the kernel needs them where it splits the keys.
    """
    query = args[1]
    batch, heads, length, dim = query.shape
    delta = _FP32_BYTES * batch * heads * _round_up(length, 32)
    return (
        (delta,)
        if query.element_size() == _FP32_BYTES
        else (delta, _FP32_BYTES * batch * heads * length * dim)
    )


def _embedding_backward(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return sorted indices, four index columns and fp32 sums of each row's segment.

    Source: aten/src/ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu. Up to 3072 indices the
    kernel allocates none of it; it is counted anyway, which keeps the log affine.
    """
    gradient, indices = args[0], args[1]
    number = int(indices.numel())
    return (_INT64_BYTES * number,) * 6 + (_FP32_BYTES * number * int(gradient.shape[-1]),)


_SCRATCH = {
    "_scaled_dot_product_flash_attention_backward.default": _flash_backward,
    # ASSUMPTION: as flash's. cuDNN plans its own workspace, which is undocumented and not measured.
    "_scaled_dot_product_cudnn_attention_backward.default": _flash_backward,
    "_safe_softmax.default": _safe_softmax,
    _EFFICIENT_BACKWARD: _efficient_backward,
    "embedding_dense_backward.default": _embedding_backward,
}
