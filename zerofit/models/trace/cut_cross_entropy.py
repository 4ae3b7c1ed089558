"""Cut cross entropy in a trace: the tensors of a loss that never materializes logits, without its kernels.

Source: cut_cross_entropy 25.1.1 (cce.py, cce_lse_forward.py, indexed_dot.py, cce_backward.py), and
https://github.com/apple/ml-cross-entropy of June 2025, whose loss also takes a bias, returns its sums of
exponentials and casts under autocast. Left out: the locks of its kernels, four bytes for thousands of
elements of a gradient. On the CPU, its kernels left out, 25.1.1 allocated 0.4 % more than this.
"""

from __future__ import annotations

import inspect
import sys
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from zerofit.models.trace.prepare import attribute_replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LOSS = "cce_linear_cross_entropy"
_UNFILTERED_SHARE = 0.5
"""ASSUMPTION: the filter of negligible gradients leaves half of each gradient's product."""
_HOLDERS = ("cut_cross_entropy.cce", "cut_cross_entropy.linear_cross_entropy")


@contextmanager
def cut_losses(note_kernel: Callable[..., None]) -> Iterator[None]:
    """Make cut_cross_entropy's losses traceable inside, if the script has imported them.

    Args:
        note_kernel: is called in a kernel's place, with its tensors and its number of operations.
    """
    found = [sys.modules[name] for name in _HOLDERS if hasattr(sys.modules.get(name), _LOSS)]
    with ExitStack() as stack:
        for module in found:
            stack.enter_context(
                attribute_replaced(module, _LOSS, _stand_in(getattr(module, _LOSS), note_kernel))
            )
        yield


def _stand_in(loss: Callable[..., Any], note_kernel: Callable[..., None]) -> Callable[..., Any]:
    """Return a function with the loss's own arguments that allocates what it does."""
    signature = inspect.signature(loss)
    is_new = "return_lse" in signature.parameters

    def cut(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        found, sums = _cut_loss(bound.arguments, note_kernel, casts=is_new)
        return (found, sums if bound.arguments["return_lse"] else None) if is_new else found

    return cut


def _cut_loss(given: dict[str, Any], note_kernel: Callable[..., None], *, casts: bool) -> tuple[Any, Any]:
    import torch

    hidden, weight, bias = given["e"].contiguous().flatten(0, -2), given["c"], given.get("bias")
    if casts and torch.is_autocast_enabled("cpu"):
        low = torch.get_autocast_dtype("cpu")
        hidden, weight, bias = (
            tensor if tensor is None else tensor.to(low) for tensor in (hidden, weight, bias)
        )
    targets, shift = given["targets"].contiguous(), int(given["shift"])
    losses, sums = _function().apply(
        hidden,
        weight,
        bias,
        targets.flatten(),
        targets[..., shift:].numel(),
        given["filter_eps"] is not None,
        bool(given.get("accum_e_fp32")),
        bool(given.get("accum_c_fp32")),
        note_kernel,
    )
    if given["reduction"] != "none":
        return getattr(losses, given["reduction"])(), sums
    whole = losses.new_zeros(targets.shape)
    whole[..., shift:] = losses.view(targets[..., shift:].shape)
    return whole[..., shift:], sums


@cache
def _function() -> Any:
    import torch

    class CutCrossEntropy(torch.autograd.Function):  # type: ignore[misc]
        """The loss of each token; labels have no values, so none is ignored."""

        @staticmethod
        def forward(
            ctx: Any,
            hidden: Any,
            weight: Any,
            bias: Any,
            targets: Any,
            num_tokens: int,
            filters: bool,
            hidden_in_fp32: bool,
            weight_in_fp32: bool,
            note_kernel: Callable[..., None],
        ) -> tuple[Any, Any]:
            ctx.note_kernel, ctx.flops = note_kernel, 2 * num_tokens * weight.numel()
            note_kernel(hidden, weight, flops=ctx.flops)
            counted = targets.new_empty(num_tokens)
            sums = hidden.new_empty(num_tokens, dtype=torch.float32)
            averages = hidden.new_empty(weight.shape[0], dtype=torch.float32) if filters else None
            ctx.save_for_backward(hidden, weight, bias, targets, counted, sums, averages)
            ctx.formats = [
                torch.float32 if wide else hidden.dtype for wide in (hidden_in_fp32, weight_in_fp32)
            ]
            ctx.mark_non_differentiable(sums)
            return hidden.new_zeros(num_tokens, dtype=torch.float32), sums

        @staticmethod
        def backward(ctx: Any, gradient: Any, _: Any) -> tuple[Any, ...]:
            hidden, weight, bias, *_, averages = ctx.saved_tensors
            order = None if averages is None else averages.argsort().to(torch.int32)
            needed = zip((hidden, weight), ctx.formats, ctx.needs_input_grad, strict=False)
            share = 1 if averages is None else _UNFILTERED_SHARE
            products = 1 + share * sum(ctx.needs_input_grad[:2])
            ctx.note_kernel(hidden, weight, flops=int(products * ctx.flops))
            made = [torch.zeros_like(tensor, dtype=kind) if needs else None for tensor, kind, needs in needed]
            of_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
            del order
            given = (hidden, weight, bias)
            found = [
                gradient if gradient is None else gradient.to(own.dtype)
                for gradient, own in zip((*made, of_bias), given, strict=True)
            ]
            return (*found, *[None] * 6)

    return CutCrossEntropy
