"""The part of a forward pass that one rank of a group runs, with collectives that have no peers."""

from __future__ import annotations

import functools
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from zerofit.core.allocation_log import COLLECTIVES
from zerofit.models.changes.quantization import torch_dtype
from zerofit.models.changes.sequence_shards import SequenceShards
from zerofit.models.trace.prepare import attribute_replaced

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from zerofit.core.allocation_log import TraceRequest


def as_one_rank(model: Any, request: TraceRequest) -> AbstractContextManager[None]:
    """Make a model's forward pass that of one rank of those that share samples.

    That is the first rank of a sequence-parallel group, or the requested rank of a pipeline, to whose blocks
    the model is already reduced.

    Raises:
        UserError: the model can't be split.
    """
    if request.sequence_parallel_size > 1:
        return _with_first_tokens(model, request)
    if request.pipeline_parallel_size > 1:
        return _as_stage(model, request)
    return nullcontext()


@contextmanager
def _as_stage(model: Any, request: TraceRequest) -> Iterator[None]:
    """Make the forward pass that of a stage, which returns hidden states, or the loss on the last stage."""
    from zerofit.models.changes.stages import run_stage  # imports torch

    stage, num_stages, own = request.pipeline_place, request.pipeline_parallel_size, model.forward

    @functools.wraps(own)
    def forward(input_ids: Any, *, received: Any = None, **inputs: Any) -> dict[str, Any]:
        for name in ("use_cache", "past_key_values", "return_dict"):
            inputs.pop(name, None)
        inputs["num_items_in_batch"] = 1.0  # a pipeline counts the labels of all its micro-batches
        first = input_ids if received is None else received
        output = run_stage(model, own, stage, num_stages, first, **inputs)
        return {"loss": output.loss.float() if stage == num_stages - 1 else output}

    with attribute_replaced(model, "forward", forward):
        yield


def received_by_stage(input_ids: Any, model: Any, request: TraceRequest) -> Any:
    """Return the hidden states that a stage receives; None on the first one.

    The residual stream has the weights' dtype, also under autocast.
    """
    import torch

    if request.pipeline_place == 0:
        return None
    shape = (*input_ids.shape, model.config.hidden_size)
    return torch.empty(*shape, dtype=torch_dtype(request.weights), requires_grad=True)


@contextmanager
def _with_first_tokens(model: Any, request: TraceRequest) -> Iterator[None]:
    shards = SequenceShards(model, Absent(request.sequence_parallel_size))
    own = model.forward

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return shards.forward(own, shards.inputs_of(args, kwargs))

    try:
        with attribute_replaced(model, "forward", forward):
            yield
    finally:
        shards.unregister()


class Absent:
    """Peers of the first rank that do not exist: tensors from them have a size and no values."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_gather(self, own: Any) -> list[Any]:
        """Return a tensor like this rank's for each rank."""
        gathered: list[Any] = _collectives().all_gather(own, self.size)
        return gathered

    def all_gather_into(self, buffer: Any, own: Any) -> None:
        """Treat the buffer as filled."""
        _collectives().all_gather_into(buffer, own)

    def all_reduce(self, tensor: Any) -> None:
        """Treat the tensor as summed."""
        _collectives().all_reduce(tensor)

    def all_to_all(self, parts: Any) -> Any:
        """Return a tensor like the parts that are sent."""
        return _collectives().all_to_all(parts)


@functools.cache
def _collectives() -> Any:
    """Return operators that the trace records by name, and that allocate what a collective fills."""
    import torch
    from torch.library import custom_op

    def all_gather(own: Any, size: int) -> Any:
        return [torch.empty_like(own) for _ in range(size)]

    def does_nothing(*tensors: Any) -> None:
        return None

    for name, schema, run, changed in (
        ("all_gather", "(Tensor own, int size) -> Tensor[]", all_gather, ()),
        ("all_gather_into", "(Tensor(a!) buffer, Tensor own) -> ()", does_nothing, ("buffer",)),
        ("all_reduce", "(Tensor(a!) tensor) -> ()", does_nothing, ("tensor",)),
        ("all_to_all", "(Tensor parts) -> Tensor", torch.empty_like, ()),
    ):
        custom_op(f"{COLLECTIVES}::{name}", run, mutates_args=changed, schema=schema).register_fake(run)
    return getattr(torch.ops, COLLECTIVES)
