"""cuda_like: a mode in which functions on CPU tensors behave as on CUDA tensors."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any

from zerofit.models.trace.attention import attend
from zerofit.models.trace.prepare import attribute_replaced

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from zerofit.core.allocation_log import TraceRequest


def cuda_like(request: TraceRequest) -> Any:
    """Return a TorchFunctionMode that replaces the CPU's behaviour by CUDA's.

    Replaced are attention kernels, dropout (one kernel that saves a boolean mask), softmax and log_softmax
    from fp16 directly to fp32, rms_norm (one kernel), functions that autocast runs in fp32 on CUDA but not on
    the CPU, and cross_entropy, which autocast runs partly in fp32.

    Also replaced are functions changed by the request's engine and PyTorch version: see TraceRequest's
    saves_linear_inputs and softmax_saves_input.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    substitutes = _substitutes(request)
    upcast, set_dtype = fp32_functions(), fp32_by_dtype()
    low = (torch.float16, torch.bfloat16)

    def as_fp32(value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) and value.dtype in low else value

    class CudaLike(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            if (func in upcast or func in set_dtype) and torch.is_autocast_enabled("cpu"):
                if func in upcast:
                    args = tuple(as_fp32(value) for value in args)
                    kwargs = {name: as_fp32(value) for name, value in kwargs.items()}
                elif args and isinstance(args[0], torch.Tensor) and args[0].dtype in low:
                    kwargs = {**kwargs, "dtype": kwargs.get("dtype") or torch.float32}
            if func is torch.nn.functional.multi_head_attention_forward:
                with _not_overridden(), self:  # within this method the mode is off
                    return func(*args, **kwargs)
            substitute = substitutes.get(func)
            return substitute(*args, **kwargs) if substitute else func(*args, **kwargs)

    return CudaLike()


def _not_overridden() -> AbstractContextManager[None]:
    """Let the function of nn.MultiheadAttention, which is Python, call the mode for its parts, not itself."""
    import torch

    return attribute_replaced(torch.nn.functional, "has_torch_function", lambda _: False)


def _substitutes(request: TraceRequest) -> dict[Any, Any]:
    import torch

    functional = torch.nn.functional
    found = {
        functional.scaled_dot_product_attention: partial(attend, capability=request.compute_capability),
        functional.dropout: _dropout,
        torch.dropout: _dropout,
        functional.rms_norm: _rms_norm,
        functional.cross_entropy: _cross_entropy,
        functional.ctc_loss: _ctc_loss,
    }
    for is_log in (False, True):
        name = "log_softmax" if is_log else "softmax"
        found[getattr(functional, name)] = partial(_functional_softmax, partial(_softmax, is_log))
        found[getattr(torch, name)] = found[getattr(torch.Tensor, name)] = partial(_softmax, is_log)
    if request.softmax_saves_input:
        found |= old_softmaxes()
    if request.saves_linear_inputs:
        found[functional.linear] = zero3_linear()
    return found


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:  # noqa: A002
    """Do what native_dropout does, which CUDA tensors use (aten/src/ATen/native/Dropout.cpp, dropout)."""
    import torch

    if not training or p == 0 or input.numel() == 0:
        return input
    dropped = torch.native_dropout(input, p, True)[0]
    return input.copy_(dropped) if inplace else dropped


def _functional_softmax(
    softmax: Any,
    input: Any,  # noqa: A002
    dim: Any = None,
    _stacklevel: int = 3,
    dtype: Any = None,
) -> Any:
    return softmax(input, dim, dtype)


def _softmax(is_log: bool, input: Any, dim: int, dtype: Any = None) -> Any:  # noqa: A002
    """Compute softmax as CUDA's fp32 kernel, which reads fp16, but not bf16, directly.

    Source: aten/src/ATen/native/SoftMax.cpp.
    """
    import torch

    if dtype is torch.float32 and input.dtype is torch.float16:
        return half_softmax().apply(input, dim)
    function = torch.log_softmax if is_log else torch.softmax
    return function(input, dim) if dtype is None else function(input, dim, dtype=dtype)


def _cross_entropy(
    input: Any,  # noqa: A002
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Compute a 16-bit log_softmax, of which nll_loss gets an fp32 copy, as under CUDA's autocast.

    cross_entropy is on none of CUDA autocast's lists and passes its input's dtype to log_softmax, which
    autocast respects; nll_loss is on the fp32 list. CPU autocast runs all of cross_entropy in fp32. Source:
    aten/src/ATen/native/LossNLL.cpp, cross_entropy_loss_symint; torch/include/ATen/autocast_mode.h.
    """
    import torch

    functional = torch.nn.functional
    is_low = input.dtype in (torch.float16, torch.bfloat16) and torch.is_autocast_enabled("cpu")
    if not is_low or target.shape == input.shape or label_smoothing:
        return functional.cross_entropy(
            input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    with torch.autocast("cpu", enabled=False):
        chances = torch.log_softmax(input, min(1, input.dim() - 1)).float()
        weight = weight if weight is None else weight.float()
        return functional.nll_loss(chances, target, weight, size_average, ignore_index, reduce, reduction)


def _ctc_loss(log_probs: Any, targets: Any, *_: Any, reduction: str = "mean", **__: Any) -> Any:
    """Allocate what the CTC loss of CUDA does, which reads lengths: fake tensors do not support it."""
    num_samples = log_probs.shape[1] if log_probs.dim() == 3 else 1
    loss = ctc_alignment().apply(log_probs, targets.numel() // num_samples)
    return loss if reduction == "none" else getattr(loss, reduction)()


@cache
def ctc_alignment() -> Any:
    """Return an autograd function with the tensors of torch's CTC loss.

    Source: aten/src/ATen/native/cuda/LossCTC.cu, ctc_loss_gpu_template and ctc_loss_backward_gpu_template.
    """
    import torch

    class CtcAlignment(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, log_probs: Any, num_targets: int) -> Any:
            steps, samples = log_probs.shape[0], log_probs.shape[1] if log_probs.dim() == 3 else 1
            alpha = log_probs.new_empty(samples, steps, 2 * num_targets + 1)
            ctx.save_for_backward(log_probs, alpha)
            return log_probs.new_empty(samples)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            log_probs, alpha = ctx.saved_tensors
            beta = torch.empty_like(alpha)
            found = torch.empty_like(log_probs)
            del beta
            return found, None

    return CtcAlignment


@cache
def half_softmax() -> Any:
    """Return an autograd function for softmax or log_softmax that reads fp16 and writes fp32."""
    import torch

    class HalfSoftmax(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, scores: Any, dim: int) -> Any:
            out = torch.empty_like(scores, dtype=torch.float32)
            ctx.save_for_backward(out)
            ctx.dtype = scores.dtype
            return out

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return torch.empty_like(ctx.saved_tensors[0], dtype=ctx.dtype), None

    return HalfSoftmax


def _rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:  # noqa: A002
    """Use the fused kernel, as CUDA does. Source: aten/src/ATen/native/layer_norm.cpp, rms_norm_symint."""
    import torch

    if weight is not None and weight.dtype != input.dtype:
        return torch.rms_norm(input, normalized_shape, weight, eps)
    return torch.ops.aten._fused_rms_norm(input, list(normalized_shape), weight, eps)[0]


_FP32_NAMES = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan "
    "pow __pow__ __rpow__ dist renorm logsumexp"
)
_FP32_LAYERS = (
    "softplus layer_norm rms_norm group_norm cosine_similarity poisson_nll_loss cosine_embedding_loss "
    "nll_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss "
    "soft_margin_loss triplet_margin_loss multi_margin_loss hinge_embedding_loss "
    "binary_cross_entropy_with_logits interpolate pdist"
)


def fp32_functions() -> set[Any]:
    """Return the functions whose inputs CUDA's autocast casts to fp32.

    Source: torch/include/ATen/autocast_mode.h of 2.13, AT_FORALL_FP32; matrix norms are left out.
    """
    import torch

    found = {getattr(holder, name, None) for holder in (torch, torch.Tensor) for name in _FP32_NAMES.split()}
    found |= {getattr(torch.nn.functional, name) for name in _FP32_LAYERS.split()}
    return (found | {torch.layer_norm, torch.group_norm, torch.rms_norm, torch.cdist}) - {None}


_FP32_BY_DTYPE = ("prod", "softmax", "log_softmax", "cumprod", "cumsum", "sum")


def fp32_by_dtype() -> set[Any]:
    """Return the functions that CUDA's autocast calls with dtype=fp32 unless a dtype is given.

    Source: torch/include/ATen/autocast_mode.h of 2.13, AT_FORALL_FP32_SET_OPT_DTYPE; norms are left out.
    """
    import torch

    found = {getattr(holder, name) for holder in (torch, torch.Tensor) for name in _FP32_BY_DTYPE}
    return found | {torch.nn.functional.softmax, torch.nn.functional.log_softmax}


def zero3_linear() -> Any:
    """Return the replacement of torch.nn.functional.linear under ZeRO-3.

    It saves input, weight and bias of every layer with a gradient, while PyTorch's saves the input only if
    the weight trains.

    Source: deepspeed/runtime/zero/linear.py, LinearFunctionForZeroStage3.
    """
    import torch

    class Zero3Linear(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, given: Any, weight: Any, bias: Any) -> Any:
            ctx.save_for_backward(given, weight, bias)
            if bias is not None and given.dim() == 2:
                return torch.addmm(bias, given, weight.t())
            out = given.matmul(weight.t())
            return out if bias is None else out.add_(bias)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            given, weight, bias = ctx.saved_tensors
            wants_given, wants_weight, wants_bias = ctx.needs_input_grad
            rows = gradient.reshape(-1, gradient.shape[-1])
            of_given = gradient.matmul(weight) if wants_given else None
            of_weight = rows.t().matmul(given.reshape(-1, given.shape[-1])) if wants_weight else None
            return of_given, of_weight, rows.sum(0) if bias is not None and wants_bias else None

    def linear(input: Any, weight: Any, bias: Any = None) -> Any:  # noqa: A002
        return Zero3Linear.apply(input, weight, bias)

    return linear


def old_softmaxes() -> dict[Any, Any]:
    """Return the replacements of softmax and functions built on it, as up to PyTorch 1.10.

    Source: tools/autograd/derivatives.yaml of 1.10: _softmax_backward_data and _log_softmax_backward_data
    save self; from 1.11 on only its dtype.
    """
    import torch

    functional = torch.nn.functional
    found: dict[Any, Any] = {}
    for is_log in (False, True):
        name, kept = "log_softmax" if is_log else "softmax", partial(_kept_softmax, _keeping_softmax(is_log))
        found[getattr(functional, name)] = partial(_functional_softmax, kept)
        found[getattr(torch, name)] = found[getattr(torch.Tensor, name)] = kept
    found[functional.cross_entropy] = partial(_old_cross_entropy, found[torch.log_softmax])
    return found


def _kept_softmax(function: Any, input: Any, dim: int, dtype: Any = None) -> Any:  # noqa: A002
    return function.apply(input, dim, dtype or input.dtype)


def _old_cross_entropy(
    log_softmax: Any,
    input: Any,  # noqa: A002
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    import torch

    chances = log_softmax(input, 1)
    return torch.nn.functional.nll_loss(chances, target, weight, None, ignore_index, None, reduction)


def _keeping_softmax(is_log: bool) -> Any:
    import torch

    function = torch.log_softmax if is_log else torch.softmax
    data = torch.ops.aten._log_softmax_backward_data if is_log else torch.ops.aten._softmax_backward_data

    class KeepingSoftmax(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, scores: Any, dim: int, dtype: Any) -> Any:
            is_half = scores.dtype is torch.float16 and dtype is torch.float32
            if is_half:  # CUDA's kernel reads fp16 directly
                out = torch.empty_like(scores, dtype=dtype)
            else:
                scores = scores.to(dtype)
                out = function(scores, dim)
            ctx.save_for_backward(scores, out)
            ctx.dim, ctx.is_half = dim, is_half
            return out

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            scores, out = ctx.saved_tensors
            if ctx.is_half:
                return torch.empty_like(scores), None, None
            return data(gradient, out, ctx.dim, scores.dtype), None, None

    return KeepingSoftmax
