"""Memory of a process, its GPU and its tensors, and a limit on it."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.machine.gpus import started_nvml, visible_indices
from zerofit.machine.this_node import process_bytes
from zerofit.models.trees import leaves

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_WHOLE_GPU = 1.0
"""torch's default fraction of a GPU."""


def reset_peak() -> None:
    """Reset VmHWM to the current resident memory, if the kernel allows it.

    Source: https://man7.org/linux/man-pages/man5/proc_pid_clear_refs.5.html, value 5.
    """
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def reset_after_creation(device: str) -> None:
    """Release what creating a model has freed, and reset all peaks to the model's own memory.

    Args:
        device: "cpu" or "cuda".
    """
    import torch

    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # of glibc, which caches freed memory
    reset_peak()
    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """NVML's reading of CUDA's first GPU; None for values it does not report."""

    free_bytes: int | None = None
    """Free memory of the GPU."""
    process_bytes: int | None = None
    """Memory of this process; None in containers, where process ids differ from the driver's."""

    def used_since(self, before: GpuReading) -> int | None:
        """Return how much more memory all processes together use than at an earlier reading."""
        if self.free_bytes is None or before.free_bytes is None:
            return None
        return before.free_bytes - self.free_bytes

    def held_since(self, before: GpuReading) -> int | None:
        """Return this process's memory: its own figure, else the GPU's increase.

        The latter assumes that nobody else uses the GPU, and that this process used none before.
        """
        return self.used_since(before) if self.process_bytes is None else self.process_bytes


def read_gpu(*, nvml: Any = None) -> GpuReading:
    """Return the driver's current reading of the first visible GPU.

    Args:
        nvml: the pynvml module or a replacement; None imports pynvml.
    """
    with started_nvml(nvml) as library:
        if library is None:
            return GpuReading()
        try:
            handles = [library.nvmlDeviceGetHandleByIndex(one) for one in range(library.nvmlDeviceGetCount())]
            uuids = tuple(str(library.nvmlDeviceGetUUID(handle)) for handle in handles)
            visible = visible_indices(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids)
            if not visible:
                return GpuReading()
            free_bytes = int(library.nvmlDeviceGetMemoryInfo(handles[visible[0]]).free)
        except library.NVMLError:
            return GpuReading()
        return GpuReading(free_bytes=free_bytes, process_bytes=_own_bytes(library, handles[visible[0]]))


def _own_bytes(library: Any, handle: Any) -> int | None:
    try:
        processes = library.nvmlDeviceGetComputeRunningProcesses(handle)
    except library.NVMLError:  # virtual GPUs don't report it
        return None
    own = (one.usedGpuMemory for one in processes if one.pid == os.getpid() and one.usedGpuMemory)
    return next(map(int, own), None)


def storage_bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes of the tensors' storages, without duplicates."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def weight_bytes(model: Any) -> int:
    """Return the bytes of parameters and buffers, including the scales of 4-bit ones."""
    scales = [tensor for one in model.parameters() for tensor in _scales(one)]
    return storage_bytes([*model.parameters(), *model.buffers(), *scales])


def _scales(parameter: Any) -> Iterator[Any]:
    """Yield bitsandbytes' additional tensors of a 4-bit parameter (functional.py, QuantState)."""
    state = getattr(parameter, "quant_state", None)
    while state is not None:
        yield from _tensors([*vars(state).values()])
        state = state.state2


def gradient_bytes(model: Any) -> int:
    """Return the bytes of all existing gradients."""
    return storage_bytes(one.grad for one in model.parameters() if one.grad is not None)


def state_bytes(optimizer: Any) -> int:
    """Return the bytes of an optimizer's states, including wrapped ones."""
    return storage_bytes(_tensors([*optimizer.state.values()]))


def _tensors(value: Any) -> Iterator[Any]:
    import torch

    return (leaf for _, leaf in leaves(value) if isinstance(leaf, torch.Tensor))


class LiveTensors:
    """Tracks the storages allocated while its mode is active, and which of them are still alive.

    Args:
        known: tensors that don't count, nor do their views.
    """

    def __init__(self, known: Iterable[Any]) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef
        from torch.utils._python_dispatch import TorchDispatchMode

        # A weak reference keeps the address of a freed storage from being reused.
        made: dict[int, tuple[Any, int]] = {}
        old = {tensor.untyped_storage()._cdata for tensor in known}

        class LiveTensorMode(TorchDispatchMode):  # type: ignore[misc]
            def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
                results = function(*args, **(kwargs or {}))
                for tensor in _tensors(results):
                    storage = tensor.untyped_storage()
                    if storage._cdata not in made and storage._cdata not in old:
                        made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                return results

        self._made = made
        self.mode = LiveTensorMode()

    def num_bytes(self) -> int:
        """Return the bytes of live storages."""
        return sum(size for reference, size in self._made.values() if not reference.expired())


@contextmanager
def limited_memory(limit_bytes: int | None, device: str, *, has_deepspeed: bool = False) -> Iterator[None]:
    """Limit the available memory, so that a trial fails as on a smaller machine; restore it at the end.

    On a GPU torch's allocator enforces it. On the CPU the kernel does, for memory mapped in addition:
    getrlimit(2), RLIMIT_DATA, which counts private writable mappings, like VmData.

    Args:
        limit_bytes: None for no limit.
        device: "cpu" or "cuda".
        has_deepspeed: whether DeepSpeed trains, which must know a GPU's limit, too.
    """
    if limit_bytes is None:
        yield
    elif device == "cpu":
        with _limited_process(limit_bytes):
            yield
    else:
        with (
            _limited_gpu(limit_bytes),
            limited_for_deepspeed(limit_bytes) if has_deepspeed else nullcontext(),
        ):
            yield


@contextmanager
def _limited_gpu(limit_bytes: int) -> Iterator[None]:
    import torch

    whole_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(gpu_fraction(limit_bytes, whole_bytes))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(_WHOLE_GPU)


def gpu_fraction(limit_bytes: int, whole_bytes: int) -> float:
    """Return a limit as fraction of a GPU's memory, at most 1."""
    return min(_WHOLE_GPU, limit_bytes / whole_bytes)


@contextmanager
def limited_for_deepspeed(limit_bytes: int, accelerator: Any = None) -> Iterator[None]:
    """Make DeepSpeed see no more free memory than a limit leaves.

    ZeRO-1 and ZeRO-2 choose by the free memory whether to flatten parameters on the GPU or on the host
    (deepspeed/runtime/zero/stage_1_and_2.py, flatten_on_accelerator); they ask the driver, which does not
    know torch's limit.

    Args:
        limit_bytes: what torch may reserve.
        accelerator: DeepSpeed's or a replacement; None asks DeepSpeed.
    """
    accelerator = accelerator or import_module("deepspeed.accelerator").get_accelerator()
    whole = accelerator.available_memory

    def available_memory(device_index: int | None = None) -> int:
        left = limit_bytes - int(accelerator.memory_reserved(device_index))
        return max(0, min(left, int(whole(device_index))))

    accelerator.available_memory = available_memory
    try:
        yield
    finally:
        del accelerator.available_memory  # of the object: its class still has the method


@contextmanager
def _limited_process(limit_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = process_bytes("VmData") + limit_bytes
    least = min(one for one in (wanted, soft) if one != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_DATA, (least, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
