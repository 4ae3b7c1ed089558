"""Joins the outputs of micro-batches, and passes gradients back to each of them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from zerofit.models.trees import leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zerofit.models.trees import Path


class NotJoinableError(Exception):
    """Outputs of micro-batches that can't be joined."""


class Joiner:
    """Joins outputs leaf by leaf."""

    def __init__(self, sizes: Sequence[int], weights_of: Callable[[Path], Sequence[float]]) -> None:
        self._sizes = sizes
        self._weights_of = weights_of

    def join(self, path: Path, values: Sequence[Any]) -> Any:
        """Return one leaf of the whole from the same leaf of all micro-batches."""
        import torch

        first = values[0]
        if not torch.is_tensor(first):
            return (
                first
                if all(type(value) is type(first) and _equal(value, first) for value in values)
                else None
            )
        if first.dim() == 0:
            return self._joined_scalar(path, values)
        if rows_per_sample(values, self._sizes) is not None:
            return torch.cat([value.detach() for value in values])
        if all(value.shape == first.shape and torch.equal(value, first) for value in values):
            return first.detach()
        raise NotJoinableError(
            f"{name_of(path)} has shape {tuple(first.shape)} for {self._sizes[0]} samples, and differs"
            " between micro-batches"
        )

    def _joined_scalar(self, path: Path, values: Sequence[Any]) -> Any:
        import torch

        if not values[0].is_floating_point():
            return values[0] if all(torch.equal(value, values[0]) for value in values) else sum(values)
        weights = self._weights_of(path)
        # A micro-batch without labels has a loss of 0/0, which does not count.
        terms = [value.detach() * weight for value, weight in zip(values, weights, strict=True) if weight]
        return torch.stack(terms).sum() if terms else torch.zeros_like(values[0])


def rows_per_sample(values: Sequence[Any], sizes: Sequence[int]) -> int | None:
    """Return the rows per sample in tensors of all micro-batches; None if their rows are not samples."""
    rows = values[0].shape[0] // sizes[0] if values[0].dim() else 0
    is_batch = rows > 0 and all(
        value.shape == (rows * size, *values[0].shape[1:]) for value, size in zip(values, sizes, strict=True)
    )
    return rows if is_batch else None


def gradient_term(output: Any, gradient: Any, *, weight: float, rows: slice) -> Any:
    """Return a scalar whose gradient by one output of a micro-batch is its part of the whole gradient.

    Args:
        output: of the micro-batch, with its graph.
        gradient: of the script's loss by the whole output.
        weight: of the micro-batch, if the output is a scalar or equal for all micro-batches.
        rows: the micro-batch's samples, if the output has a batch dimension.
    """
    import torch

    gradient = torch.as_tensor(gradient)
    if output.shape == gradient.shape:
        return injected(output, gradient * weight)
    per_sample = output.shape[0] // (rows.stop - rows.start)
    return injected(output, gradient[rows.start * per_sample : rows.stop * per_sample])


def injected(output: Any, gradient: Any) -> Any:
    """Return a zero whose backward gives the output that gradient; for a scalar output, their product.

    A product and its sum would need another tensor of the output's size.
    """
    import torch

    if output.dim():
        return _inject().apply(output, gradient)
    wide = torch.promote_types(output.dtype, torch.float32)
    return output.to(wide) * gradient.to(device=output.device, dtype=wide)


@functools.cache
def _inject() -> Any:
    import torch

    class Inject(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, output: Any, gradient: Any) -> Any:
            ctx.save_for_backward(gradient)
            ctx.dtype = output.dtype
            return output.new_zeros((), dtype=torch.promote_types(output.dtype, torch.float32))

        @staticmethod
        def backward(ctx: Any, scale: Any) -> Any:
            (gradient,) = ctx.saved_tensors
            # In the wider dtype: fp16's loss scale alone exceeds fp16.
            return (gradient.to(scale.dtype) * scale).to(ctx.dtype), None

    return Inject


@functools.cache
def _hand_out() -> Any:
    import torch

    class HandOut(torch.autograd.Function):  # type: ignore[misc]
        """Replaces the model's graph: gradients of the script's loss end here."""

        @staticmethod
        def forward(ctx: Any, anchor: Any, receive: Any, tensors: Any) -> Any:
            ctx.receive = receive
            ctx.set_materialize_grads(False)
            return tuple(tensors)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            ctx.receive(gradients)
            return None, None, None

    return HandOut


def handed_out(anchor: Any, receive: Callable[[tuple[Any, ...]], None], tensors: list[Any]) -> list[Any]:
    """Return the tensors as if a model had computed them; their gradients are passed to `receive`.

    Args:
        anchor: a leaf that requires a gradient, and never gets one.
        receive: called with one gradient, or None, for each tensor, at each backward.
        tensors: values without graph.
    """
    return list(_hand_out().apply(anchor, receive, tensors))


def flat(outputs: Any) -> dict[Path, Any]:
    """Return the leaves of outputs by their paths."""
    return dict(leaves(outputs))


def name_of(path: Path) -> str:
    """Return the name of an output's leaf for messages."""
    return "output " + ".".join(str(key) for key in path) if path else "the output"


def _equal(value: Any, other: Any) -> bool:
    try:
        return bool(value == other)
    except (TypeError, ValueError, RuntimeError):
        return False
