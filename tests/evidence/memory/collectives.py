"""Collectives that have finished, and released their tensors, when they return.

Gloo's own threads release a tensor some time after the collective has finished, so that peaks would be
random. NCCL has no such threads. Here gloo works on copies that the tracker does not see.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from collections.abc import Callable

_NAMES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_gather",
    "all_to_all_single",
)


class _Done:
    """The handle of a finished collective; like NCCL's, it holds its tensors until `wait`."""

    def __init__(self, tensors: tuple[Any, ...]) -> None:
        self._tensors: tuple[Any, ...] | None = tensors

    def wait(self, timeout: Any = None) -> bool:
        self._tensors = None
        return True

    def is_completed(self) -> bool:
        return True


def use_copies() -> None:
    """Replace torch's collectives by these; call it before DeepSpeed makes its backend."""
    for name in _NAMES:
        setattr(dist, name, _on_copies(getattr(dist, name)))
    schedules._wait_batch_p2p = _wait_and_release
    schedules._batch_p2p = _sending_copies(schedules._batch_p2p)


def _wait_and_release(works: list[Any]) -> None:
    """Wait for the sends of pipeline stages and release them; gloo's works hold their tensors even then."""
    for work in works:
        work.wait()
    works.clear()


def _sending_copies(inside: Callable[..., Any]) -> Callable[..., Any]:
    """Send copies: NCCL releases what it has sent, gloo's works hold it until they are waited for."""

    @wraps(inside)
    def batch(operations: list[Any], *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes(), torch.no_grad():
            copies = [
                dist.P2POp(one.op, one.tensor.detach().clone(), one.peer, one.group, one.tag)
                if one.op is dist.isend
                else one
                for one in operations
            ]
            return inside(copies, *args, **kwargs)

    return batch


def _on_copies(inside: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(inside)
    def collective(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        with _disable_current_modes(), torch.no_grad():
            pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
            values = [_copy(value, pairs) for value in args]
            named = {name: _copy(value, pairs) for name, value in kwargs.items()}
            inside(*values, **named)
            for original, copied in pairs:
                original.detach().copy_(copied)
        return _Done(tuple(original for original, _ in pairs)) if async_op else None

    return collective


def _copy(value: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Return a value with copies of its tensors, and append each (original, copy) to pairs."""
    if isinstance(value, torch.Tensor):
        pairs.append((value, value.detach().clone()))
        return pairs[-1][1]
    return [_copy(item, pairs) for item in value] if isinstance(value, list) else value
