"""flash_package: transformers' way through the flash-attn package, which need not be installed."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.strategy import Precision
from zerofit.core.upstream.transformers import flash_attention_from
from zerofit.models.trace.attention import flash_kernel
from zerofit.models.trace.prepare import replaced

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.core.allocation_log import TraceRequest

_PREFIX = "flash_attention_"
_LEAST_CAPABILITY = {"flash_attention_2": (8, 0), "flash_attention_3": (9, 0)}
"""Source: https://github.com/Dao-AILab/flash-attention, README: Ampere for version 2, Hopper for 3."""


@contextmanager
def flash_package(request: TraceRequest) -> Iterator[None]:
    """Let transformers find flash-attn's functions where a request asks for them; they take fake tensors.

    A padded batch goes through transformers' own unpadding. How many tokens are padding is not known: none
    are left out, which is what a batch needs at the most. Version 3 is taken to allocate what 2 does, and
    samples are never packed into one (ASSUMPTIONS).

    Raises:
        UserError: the GPU or the number format is none that flash-attn takes.
    """
    if not (request.attention or "").startswith(_PREFIX):
        yield
        return
    _check(request)
    with ExitStack() as stack:
        for holder, name, value in flash_attention_from(_flash, _flash_varlen):
            stack.enter_context(replaced(holder, name, value))
        yield


def _check(request: TraceRequest) -> None:
    least = _LEAST_CAPABILITY.get(request.attention or "", (8, 0))
    if request.compute_capability < least:
        raise UserError(
            "flash-attention-needs-newer-gpu",
            "the GPU is too old for this attention",
            found=f"--attention {request.attention}, compute capability "
            f"{'.'.join(map(str, request.compute_capability))}",
            why=f"its kernels are made for {'.'.join(map(str, least))} and later",
            fix="leave --attention out: PyTorch takes the best kernel that it has for the GPU",
        )
    if request.weights is Precision.FP32 and request.autocast is None:
        raise UserError(
            "flash-attention-needs-16-bit",
            "this attention takes no fp32",
            found=f"--attention {request.attention}, fp32 without autocast",
            why="flash-attn has kernels for fp16 and bf16 alone",
            fix="train in bf16 or fp16, or leave --attention out",
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
    return flash_kernel(query, key, value, None, dropout_p, causal, softmax_scale).transpose(1, 2)


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
    return _flash(query, key, value, dropout_p, softmax_scale, causal).flatten(0, 1)
