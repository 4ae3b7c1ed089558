"""cuda_like: the mode under which functions on CPU tensors do what they would do on CUDA ones."""

from __future__ import annotations

from functools import partial
from typing import Any

from zerofit.probe.trace.attention import attend


def cuda_like(capability: tuple[int, int]) -> Any:
    """Return a TorchFunctionMode that puts CUDA's way in the place of the CPU's.

    Substituted: attention kernels, dropout (one kernel that keeps a boolean mask), softmax from fp16 straight
    to fp32, rms_norm (one kernel), and the functions that autocast runs in fp32 on CUDA but not on the CPU.

    Args:
        capability: the GPU's compute capability.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    substitutes = _substitutes(capability)
    upcast, set_dtype = _fp32_functions(), _fp32_by_dtype()
    low = (torch.float16, torch.bfloat16)

    def as_fp32(value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) and value.dtype in low else value

    class CudaLike(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            if (func in upcast or func in set_dtype) and torch.is_autocast_cpu_enabled():
                if func in upcast:
                    args = tuple(as_fp32(value) for value in args)
                    kwargs = {name: as_fp32(value) for name, value in kwargs.items()}
                elif args and isinstance(args[0], torch.Tensor) and args[0].dtype in low:
                    kwargs = {**kwargs, "dtype": kwargs.get("dtype") or torch.float32}
            substitute = substitutes.get(func)
            return substitute(*args, **kwargs) if substitute else func(*args, **kwargs)

    return CudaLike()


def _substitutes(capability: tuple[int, int]) -> dict[Any, Any]:
    import torch

    functional = torch.nn.functional
    return {
        functional.scaled_dot_product_attention: partial(attend, capability=capability),
        functional.dropout: _dropout,
        torch.dropout: _dropout,
        functional.softmax: _functional_softmax,
        torch.softmax: _softmax,
        torch.Tensor.softmax: _softmax,
        functional.rms_norm: _rms_norm,
    }


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:  # noqa: A002
    """Source: aten/src/ATen/native/Dropout.cpp, dropout: CUDA tensors take native_dropout."""
    import torch

    if not training or p == 0 or input.numel() == 0:
        return input
    dropped = torch.native_dropout(input, p, True)[0]
    return input.copy_(dropped) if inplace else dropped


def _functional_softmax(input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:  # noqa: A002
    return _softmax(input, dim, dtype=dtype)


def _softmax(input: Any, dim: int, dtype: Any = None) -> Any:  # noqa: A002
    """Source: aten/src/ATen/native/SoftMax.cpp, softmax: fp16 on CUDA is read by the fp32 kernel itself."""
    import torch

    if dtype is torch.float32 and input.dtype is torch.float16:
        return half_softmax().apply(input, dim)
    return torch.softmax(input, dim) if dtype is None else torch.softmax(input, dim, dtype=dtype)


def half_softmax() -> Any:
    """Return the autograd function of a softmax that reads fp16 and writes fp32."""
    global _half_softmax
    if _half_softmax is None:
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

        _half_softmax = HalfSoftmax
    return _half_softmax


_half_softmax: Any = None


def _rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:  # noqa: A002
    """Source: aten/src/ATen/native/layer_norm.cpp, rms_norm_symint: CUDA takes the fused kernel."""
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
    "nll_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss soft_margin_loss "
    "triplet_margin_loss hinge_embedding_loss binary_cross_entropy_with_logits interpolate cross_entropy"
)


def _fp32_functions() -> set[Any]:
    """Functions that CUDA's autocast feeds fp32.

    Source: torch/include/ATen/autocast_mode.h, AT_FORALL_FP32.
    """
    import torch

    found = {getattr(holder, name, None) for holder in (torch, torch.Tensor) for name in _FP32_NAMES.split()}
    found |= {getattr(torch.nn.functional, name) for name in _FP32_LAYERS.split()}
    return (found | {torch.layer_norm, torch.group_norm, torch.rms_norm, torch.cdist}) - {None}


def _fp32_by_dtype() -> set[Any]:
    """Functions that CUDA's autocast tells to answer in fp32 (AT_FORALL_FP32_SET_OPT_DTYPE)."""
    import torch

    names = ("prod", "softmax", "log_softmax", "cumprod", "cumsum", "sum")
    found = {getattr(holder, name) for holder in (torch, torch.Tensor) for name in names}
    return found | {torch.nn.functional.softmax, torch.nn.functional.log_softmax}
