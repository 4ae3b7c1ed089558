"""What a process and its tensors hold: the kernel's figures, torch's, the driver's, and tensors counted."""

from __future__ import annotations

import ctypes
import gc
import os
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.probe.gpus import visible_indices
from zerofit.units import KIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_STATUS = Path("/proc/self/status")


def process_bytes(field: str) -> int:
    """Return a figure of this process from /proc/self/status: VmRSS, or VmHWM, its peak."""
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


def device_used_bytes() -> int | None:
    """Return what all processes together hold of the first visible GPU; None where the driver can't tell."""
    with _gpu() as (library, handle):
        return None if handle is None else int(library.nvmlDeviceGetMemoryInfo(handle).used)


def device_bytes(*, used_before: int | None) -> int | None:
    """Return what this process holds of its GPU, as the driver says; None where it can't tell.

    In a container the driver's process ids are not those that we see: what the GPU has in use beside
    used_before stands in, which holds as long as nobody else uses it.

    Args:
        used_before: device_used_bytes() before CUDA started.
    """
    with _gpu() as (library, handle):
        if handle is None:
            return None
        for process in library.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory:
                return int(process.usedGpuMemory)
        used = int(library.nvmlDeviceGetMemoryInfo(handle).used)
        return None if used_before is None else used - used_before


@contextmanager
def _gpu() -> Iterator[tuple[Any, Any]]:
    """Yield NVML and the handle of the first GPU that CUDA sees; None for both where there is none."""
    try:
        import pynvml
    except ImportError:
        yield None, None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None, None
        return
    try:
        yield pynvml, _first_visible(pynvml)
    finally:
        pynvml.nvmlShutdown()


def _first_visible(library: Any) -> Any:
    handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
    uuids = tuple(str(library.nvmlDeviceGetUUID(handle)) for handle in handles)
    visible = visible_indices(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids)
    return handles[visible[0]] if visible else None


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
