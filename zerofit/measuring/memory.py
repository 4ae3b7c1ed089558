"""What a process and its tensors hold: the kernel's figures, and tensors counted."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.units import KIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_STATUS = Path("/proc/self/status")


def process_bytes(field: str) -> int:
    """Return a figure of this process from /proc/self/status: VmRSS, VmHWM, its peak, or VmData."""
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * KIB
    raise KeyError(field)


def forget_peak() -> None:
    """Let VmHWM begin anew at what the process holds now, where the kernel allows it.

    Source: https://man7.org/linux/man-pages/man5/proc_pid_clear_refs.5.html, value 5.
    """
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def forget_making(device: str) -> None:
    """Give back what making a model has left free, and let all peaks begin anew at what it holds itself.

    Args:
        device: "cpu" or "cuda".
    """
    import torch

    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # of glibc, which keeps freed memory for later
    forget_peak()
    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def storage_bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes of the storages behind tensors, each once."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def weight_bytes(model: Any) -> int:
    """Return the bytes of parameters and buffers, and of the scales of those in 4 bit."""
    scales = [tensor for one in model.parameters() for tensor in _scales(one)]
    return storage_bytes([*model.parameters(), *model.buffers(), *scales])


def _scales(parameter: Any) -> Iterator[Any]:
    """Yield what bitsandbytes keeps beside a parameter in 4 bit (bitsandbytes/functional.py, QuantState)."""
    state = getattr(parameter, "quant_state", None)
    while state is not None:
        yield from _tensors([*vars(state).values()])
        state = state.state2


def gradient_bytes(model: Any) -> int:
    """Return the bytes of all gradients that are there."""
    return storage_bytes(one.grad for one in model.parameters() if one.grad is not None)


def state_bytes(optimizer: Any) -> int:
    """Return the bytes of an optimizer's states, those of wrapped ones too."""
    return storage_bytes(_tensors([*optimizer.state.values()]))


def _tensors(value: Any) -> Iterator[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


class LiveTensors:
    """Knows the storages that are made while its mode is entered, and which of them are still alive.

    Args:
        known: tensors that are not counted, nor their views.
    """

    def __init__(self, known: Iterable[Any]) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef
        from torch.utils._python_dispatch import TorchDispatchMode

        # A weak reference keeps the address of a dead storage from being given out again.
        made: dict[int, tuple[Any, int]] = {}
        old = {tensor.untyped_storage()._cdata for tensor in known}

        class Watching(TorchDispatchMode):  # type: ignore[misc]
            def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
                results = function(*args, **(kwargs or {}))
                for tensor in _tensors(results):
                    storage = tensor.untyped_storage()
                    if storage._cdata not in made and storage._cdata not in old:
                        made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                return results

        self._made = made
        self.mode = Watching()

    def num_bytes(self) -> int:
        """Return the bytes of those that are alive."""
        return sum(size for reference, size in self._made.values() if not reference.expired())
