"""Functions that keep more for the backward pass than today's PyTorch: DeepSpeed's linear, old softmax."""

from __future__ import annotations

from functools import partial
from typing import Any


def zero3_linear() -> Any:
    """Return what stands in for torch.nn.functional.linear under DeepSpeed's stage 3.

    It keeps input, weight and bias of every layer through which a gradient flows, where PyTorch's own keeps
    the input only if the weight trains.

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
    """Return the functions that stand in for softmax and what is made of it, as up to PyTorch 1.10.

    Source: tools/autograd/derivatives.yaml of 1.10: _softmax_backward_data and _log_softmax_backward_data
    take self; from 1.11 on they take its dtype alone.
    """
    import torch

    functional = torch.nn.functional
    softmax, log_softmax = (partial(_softmax, _keeping_softmax(is_log)) for is_log in (False, True))
    return {
        functional.softmax: partial(_functional, softmax),
        torch.softmax: softmax,
        torch.Tensor.softmax: softmax,
        functional.log_softmax: partial(_functional, log_softmax),
        torch.log_softmax: log_softmax,
        torch.Tensor.log_softmax: log_softmax,
        functional.cross_entropy: partial(_cross_entropy, log_softmax),
    }


def _functional(softmax: Any, input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:  # noqa: A002
    return softmax(input, dim, dtype)


def _softmax(function: Any, input: Any, dim: int, dtype: Any = None) -> Any:  # noqa: A002
    return function.apply(input, dim, dtype or input.dtype)


def _cross_entropy(
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
            if is_half:  # CUDA's kernel reads fp16 itself
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
