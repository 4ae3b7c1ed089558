"""The part of a forward pass that falls to the first rank of a group, with collectives without peers."""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from zerofit.core.allocation_log import COLLECTIVES
from zerofit.models.changes.sequence_shards import SequenceShards

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.core.allocation_log import TraceRequest


@contextmanager
def as_first_rank(model: Any, request: TraceRequest) -> Iterator[None]:
    """Let a model's forward pass be that of the first rank that shares its samples, as the engine cuts them.

    Raises:
        UserError: the model can't be run in parts.
    """
    if request.sequence_parallel_size == 1:
        yield
        return
    shards = SequenceShards(model, Absent(request.sequence_parallel_size))
    own = model.forward

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return shards.forward(own, shards.inputs_of(args, kwargs))

    model.forward = forward
    try:
        yield
    finally:
        del model.forward
        shards.let_go()


class Absent:
    """Peers of the first rank that are not there: what comes from them has a size and no values."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_gather(self, own: Any) -> list[Any]:
        """Return as many tensors like its own."""
        gathered: list[Any] = _collectives().all_gather(own, self.size)
        return gathered

    def all_gather_into(self, buffer: Any, own: Any) -> None:
        """Take the buffer as filled."""
        _collectives().all_gather_into(buffer, own)

    def all_reduce(self, tensor: Any) -> None:
        """Take the tensor as summed."""
        _collectives().all_reduce(tensor)

    def all_to_all(self, parts: Any) -> Any:
        """Return a tensor like the parts that are sent."""
        return _collectives().all_to_all(parts)


@functools.cache
def _collectives() -> Any:
    """Return operators that a trace sees by their names, and that make the memory that a collective fills."""
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
