"""What the driver says of the GPU that a rung runs on: what is free of it, and what this process holds."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from enum import Enum
from typing import Any

from zerofit.core.units import MIB
from zerofit.machine.gpus import visible_indices

_SMI = ("nvidia-smi", "--query-gpu=uuid,memory.free", "--format=csv,noheader,nounits")
"""A line each GPU, memory in MiB (nvidia-smi --help-query-gpu)."""
_SMI_LIMIT_S = 30.0
"""ASSUMPTION: a driver that has to load its firmware first answers within it."""


class Source(Enum):
    """What the driver was asked through."""

    NVML = "NVML"
    CUDA = "CUDA"
    SMI = "nvidia-smi"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """What the driver said at one moment of the first GPU that CUDA sees; None for what it can't tell."""

    source: Source
    free_bytes: int | None
    """What no process holds."""
    process_bytes: int | None
    """What this process holds. A container's process ids are not the driver's, which then knows none."""

    def used_since(self, before: GpuReading) -> int | None:
        """Return how much more all processes together hold of it than they did before.

        None where the two readings are of sources that may not count alike.
        """
        if self.free_bytes is None or before.free_bytes is None:
            return None
        if self.source is not before.source and (before.source, self.source) not in _COUNT_ALIKE:
            return None
        return before.free_bytes - self.free_bytes

    def held_since(self, before: GpuReading) -> int | None:
        """Return what this process holds: what the driver says, else what the GPU has more in use.

        The latter holds as long as nobody else uses it, and as this process held nothing before.
        """
        return self.used_since(before) if self.process_bytes is None else self.process_bytes


_COUNT_ALIKE = {(Source.SMI, Source.CUDA)}
"""ASSUMPTION: nvidia-smi, before CUDA has started, and CUDA after it state the same free memory, but for
nvidia-smi's rounding to MiB; without NVML nothing else can be compared with what was before."""


def read_gpu(*, has_cuda: bool, nvml: Any = None) -> GpuReading:
    """Return what the driver says now; without NVML, what CUDA or nvidia-smi says.

    Args:
        has_cuda: whether CUDA has started in this process: asking it starts it.
        nvml: the pynvml module, or one like it; None imports pynvml.
    """
    library = _started(nvml)
    if library is not None:
        try:
            handle = _first_visible(library)
            if handle is not None:
                free = int(library.nvmlDeviceGetMemoryInfo(handle).free)
                own = _own_bytes(library, handle)
                return GpuReading(source=Source.NVML, free_bytes=free, process_bytes=own)
        except library.NVMLError:
            pass  # a GPU that does not answer it may answer the others
        finally:
            library.nvmlShutdown()
    if has_cuda:
        return GpuReading(source=Source.CUDA, free_bytes=_free_by_cuda(), process_bytes=None)
    return GpuReading(source=Source.SMI, free_bytes=_free_by_smi(), process_bytes=None)


def _own_bytes(library: Any, handle: Any) -> int | None:
    try:
        processes = library.nvmlDeviceGetComputeRunningProcesses(handle)
    except library.NVMLError:  # virtual GPUs do not tell
        return None
    return next((int(one.usedGpuMemory) for one in processes if _is_own(one)), None)


def _is_own(process: Any) -> bool:
    return process.pid == os.getpid() and bool(process.usedGpuMemory)


def _free_by_cuda() -> int:
    import torch

    free, _ = torch.cuda.mem_get_info()
    return int(free)


def _free_by_smi() -> int | None:
    try:
        told = subprocess.run(_SMI, capture_output=True, text=True, check=True, timeout=_SMI_LIMIT_S).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [[cell.strip() for cell in line.split(",")] for line in told.splitlines()]
    rows = [row for row in rows if len(row) == len(("uuid", "memory.free"))]  # others are warnings
    visible = visible_indices(os.environ.get("CUDA_VISIBLE_DEVICES"), tuple(uuid for uuid, _ in rows))
    if not visible or not rows[visible[0]][1].isdigit():  # "[N/A]"
        return None
    return int(rows[visible[0]][1]) * MIB


def _started(nvml: Any) -> Any:
    library = nvml or _imported()
    if library is None:
        return None
    try:
        library.nvmlInit()
    except library.NVMLError:
        return None
    return library


def _imported() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def _first_visible(library: Any) -> Any:
    handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
    uuids = tuple(str(library.nvmlDeviceGetUUID(handle)) for handle in handles)
    visible = visible_indices(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids)
    return handles[visible[0]] if visible else None
