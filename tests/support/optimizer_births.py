"""What real optimizer steps keep and hold at the most: every storage that is made, followed to its end."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SCALAR_BYTES = 8
"""Scalars are not compared: torch makes many on the way, of 4 bytes each."""


class Births(TorchDispatchMode):
    """Follows the storages that are made in its scope, and how many bytes of them are alive at most."""

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._forget_the_dead()
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known and storage.nbytes() > SCALAR_BYTES:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self._alive_bytes)
        return result

    def _forget_the_dead(self) -> None:
        self._alive = {key: alive for key, alive in self._alive.items() if not alive[0].expired()}

    @property
    def _alive_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self._alive.values())

    def left(self) -> int:
        """Return the bytes that are alive now."""
        gc.collect()
        self._forget_the_dead()
        return self._alive_bytes


@dataclass(frozen=True)
class Measured:
    """Two real steps of an optimizer."""

    states: int
    peaks: tuple[int, int]
    """The most that was alive in the first and the second step, over parameters and gradients."""


def measured(
    make: Callable[[list[Any]], torch.optim.Optimizer], parameters: list[torch.nn.Parameter]
) -> Measured:
    """Return what two real steps keep and hold, with what the constructor has made."""
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    known = [*parameters, *(one.grad for one in parameters if one.grad is not None)]
    make(parameters)  # imports its library, which may make tensors of its own
    births = Births(known)
    with births:
        optimizer = make(parameters)
        optimizer.step()
    first, states = births.peak, births.left()
    births.peak = states
    with births:
        optimizer.step()
    return Measured(states=states, peaks=(first, births.peak))
