"""Joins the outputs of micro-batches, and splits the gradients of joined outputs."""

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
        """Return one leaf of the joined outputs from this leaf of all micro-batches."""
        import torch

        first = values[0]
        if not torch.is_tensor(first):
            is_equal = all(type(value) is type(first) and _equal(value, first) for value in values)
            return first if is_equal else None
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
        # The loss of a micro-batch without labels is 0/0, and is ignored.
        terms = [value.detach() * weight for value, weight in zip(values, weights, strict=True) if weight]
        return torch.stack(terms).sum() if terms else torch.zeros_like(values[0])


def rows_per_sample(values: Sequence[Any], sizes: Sequence[int]) -> int | None:
    """Return the rows per sample in all micro-batches' tensors; None if they have no batch dimension."""
    rows = values[0].shape[0] // sizes[0] if values[0].dim() else 0
    is_batch = rows > 0 and all(
        value.shape == (rows * size, *values[0].shape[1:]) for value, size in zip(values, sizes, strict=True)
    )
    return rows if is_batch else None


def gradient_term(output: Any, gradient: Any, *, weight: float, rows: slice) -> Any:
    """Return a scalar whose backward gives a micro-batch's output its part of the joined output's gradient.

    Args:
        output: of the micro-batch, with its graph.
        gradient: of the script's loss with respect to the joined output.
        weight: of the micro-batch, for scalars, and outputs that are equal for all micro-batches.
        rows: the micro-batch's samples, for outputs with a batch dimension.
    """
    import torch

    gradient = torch.as_tensor(gradient)
    if output.shape == gradient.shape:
        return injected(output, gradient * weight)
    per_sample = output.shape[0] // (rows.stop - rows.start)
    return injected(output, gradient[rows.start * per_sample : rows.stop * per_sample])


def injected(output: Any, gradient: Any) -> Any:
    """Return a zero whose backward gives the output this gradient; for a scalar output, their product.

    (output * gradient).sum() would need another tensor of the output's size.
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
            # In the wider dtype, since the loss scale exceeds fp16's range.
            return (gradient.to(scale.dtype) * scale).to(ctx.dtype), None

    return Inject


@functools.cache
def _detached_outputs_class() -> Any:
    import torch

    class DetachedOutputs(torch.autograd.Function):  # type: ignore[misc]
        """Returns outputs to the script without the model's graph, and receives their gradients."""

        @staticmethod
        def forward(ctx: Any, anchor: Any, receive: Any, tensors: Any) -> Any:
            ctx.receive = receive
            ctx.set_materialize_grads(False)
            return tuple(tensors)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            ctx.receive(gradients)
            return None, None, None

    return DetachedOutputs


def detached_outputs(
    anchor: Any, receive: Callable[[tuple[Any, ...]], None], tensors: list[Any]
) -> list[Any]:
    """Return the tensors with a graph that passes their gradients to `receive`.

    Args:
        anchor: a leaf that requires a gradient, and never gets one.
        receive: called in each backward pass with a gradient or None for each tensor.
        tensors: values without graph.
    """
    return list(_detached_outputs_class().apply(anchor, receive, tensors))


def flat(outputs: Any) -> dict[Path, Any]:
    """Return the leaves of outputs by path."""
    return dict(leaves(outputs))


def name_of(path: Path) -> str:
    """Return an output's name for messages."""
    return "output " + ".".join(str(key) for key in path) if path else "the output"


def _equal(value: Any, other: Any) -> bool:
    try:
        return bool(value == other)
    except (TypeError, ValueError, RuntimeError):
        return False
