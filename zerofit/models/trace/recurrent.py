"""Recurrent layers as cuDNN runs them: all steps of all layers in one kernel.

The CPU has no such kernel for GRU and plain RNN, and computes them step by step. Samples of several lengths,
packed, count as if all were as long as the longest: an upper bound.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from zerofit.core.upstream.torch import PACKS, UNPACKS, recurrent_functions
from zerofit.models.trace.prepare import attribute_replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_KEPT = {"lstm": 6, "gru": 5, "rnn_tanh": 1, "rnn_relu": 1}
"""Values that cuDNN keeps for the backward pass, in multiples of the hidden state of each step: the gates (of
GRU one more, for the candidate's product), LSTM's cell state and its tanh. ASSUMPTION: cuDNN does not say;
these are what the formulas need."""


@contextmanager
def recurrent_kernels(note: Callable[..., None]) -> Iterator[None]:
    """Replace the functions of torch's recurrent layers by what cuDNN allocates.

    Args:
        note: called with the tensors of a kernel and its flops.
    """
    holder, plain = recurrent_functions()
    kernels = {name: partial(_run, name, note) for name in _KEPT}
    before = dict(plain)
    with ExitStack() as stack:
        for name, kernel in kernels.items():
            stack.enter_context(attribute_replaced(holder, name, kernel))
        stack.enter_context(attribute_replaced(holder, PACKS, _pack))
        stack.enter_context(attribute_replaced(holder, UNPACKS, _unpack))
        plain.update({kind: kernels[kind.lower()] for kind in plain})
        try:
            yield
        finally:
            plain.update(before)


def _pack(given: Any, lengths: Any, batch_first: bool) -> tuple[Any, Any]:
    """Return all steps of all samples in one list, and the number of samples at each step."""
    import torch

    steps_first = given.transpose(0, 1) if batch_first else given
    steps, samples = steps_first.shape[:2]
    data = steps_first.reshape(steps * samples, *steps_first.shape[2:]).clone()
    return data, torch.full((steps,), samples, dtype=torch.int64)


def _unpack(data: Any, batch_sizes: Any, batch_first: bool, padding: float, length: int) -> tuple[Any, Any]:
    """Return the samples side by side, and their lengths."""
    import torch

    steps = int(batch_sizes.shape[0])
    samples = data.shape[0] // steps
    whole = data.view(steps, samples, *data.shape[1:]).clone()
    lengths = torch.full((samples,), steps, dtype=torch.int64)
    return (whole.transpose(0, 1) if batch_first else whole), lengths


def _run(name: str, note: Callable[..., None], given: Any, *args: Any) -> tuple[Any, ...]:
    """Run the layers of one module; args are those of torch.lstm, torch.gru and others, packed or not."""
    import torch

    is_packed = isinstance(args[0], torch.Tensor) and not args[0].dtype.is_floating_point
    states, weights, _, num_layers = args[1:5] if is_packed else args[:4]
    is_bidirectional = bool(args[7 if is_packed else 6])
    states = states if isinstance(states, (list, tuple)) else (states,)
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        given, states = given.to(dtype), [state.to(dtype) for state in states]
        weights = [weight.to(dtype) for weight in weights]
    directions = 2 if is_bidirectional else 1
    rows = given.numel() // given.shape[-1]
    kept = rows * num_layers * directions * weights[1].shape[-1] * _KEPT[name]
    found = _kernel().apply(note, len(states), kept, directions, given, *states, *weights)
    return tuple(found)


@cache
def _kernel() -> Any:
    import torch

    class Recurrent(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(
            ctx: Any, note: Any, num_states: int, kept: int, directions: int, given: Any, *tensors: Any
        ) -> Any:
            states, weights = tensors[:num_states], tensors[num_states:]
            reserve = given.new_empty(kept)
            out = given.new_empty(*given.shape[:-1], directions * states[0].shape[-1])
            last = [torch.empty_like(state) for state in states]
            ctx.note, ctx.num_states, ctx.flops = note, num_states, _flops(given, weights)
            ctx.save_for_backward(given, out, reserve, *tensors)
            note(given, out, reserve, *weights, flops=ctx.flops)
            return (out, *last)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            given, out, reserve, *tensors = ctx.saved_tensors
            states, weights = tensors[: ctx.num_states], tensors[ctx.num_states :]
            of_given = torch.empty_like(given)
            of_states = [torch.empty_like(state) for state in states]
            buffer = given.new_zeros(sum(weight.numel() for weight in weights))  # one for all weights
            of_weights = buffer.split([weight.numel() for weight in weights])
            ctx.note(given, out, reserve, of_given, *weights, buffer, flops=2 * ctx.flops)
            views = [part.view_as(weight) for part, weight in zip(of_weights, weights, strict=True)]
            return (None, None, None, None, of_given, *of_states, *views)

    return Recurrent


def _flops(given: Any, weights: Any) -> int:
    """Count the products with each matrix of the layers."""
    rows = given.numel() // given.shape[-1]
    return 2 * int(rows) * sum(int(weight.numel()) for weight in weights if weight.dim() == 2)
