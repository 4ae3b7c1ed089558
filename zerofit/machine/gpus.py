"""The NVIDIA GPUs of this node, through NVML: without torch or a CUDA context."""

from __future__ import annotations

import re
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.facts import GpuSpec
from zerofit.machine.gpu_catalog import with_catalog_rates
from zerofit.machine.gpu_links import with_links
from zerofit.machine.toolchain import Driver

if TYPE_CHECKING:
    from collections.abc import Iterator


def probe_gpus(
    *,
    gpu_ids: tuple[int, ...] | None,
    visible_devices: str | None,
    may_be_unreadable: bool = False,
    root: Path = Path("/"),
    nvml: Any = None,
) -> tuple[GpuSpec, ...]:
    """Return the GPUs that a run may use, in the order in which it would see them.

    Name, memory, compute capability and links come from the driver; the catalog adds the rates of known GPUs.

    Args:
        gpu_ids: the ids from --gpu-ids, which override visible_devices as in accelerate; None if not given.
        visible_devices: CUDA_VISIBLE_DEVICES, or None if unset.
        may_be_unreadable: ignore GPUs that exist but can't be read.
        root: the file-system root for /dev.
        nvml: the pynvml module or a replacement; None imports pynvml.

    Raises:
        UserError: an id does not exist or is repeated; or there are GPUs, but none can be read.
    """
    with started_nvml(nvml) as library:
        num_gpus = library.nvmlDeviceGetCount() if library else 0
        if gpu_ids is not None:
            check_gpu_ids(gpu_ids, num_gpus)
            indices = gpu_ids
        else:
            uuids = tuple(_uuid(index, library) for index in range(num_gpus))
            indices = visible_indices(visible_devices, uuids)
        specs = {index: spec for index in indices if (spec := _spec(index, library)) is not None}
        found = tuple(with_links(specs, library))
    if not found and not may_be_unreadable:
        _check_there_are_none(None if gpu_ids is not None else visible_devices, root)
    return found


def probe_driver(*, nvml: Any = None) -> Driver | None:
    """Return the NVIDIA driver's description, or None without a driver.

    Args:
        nvml: the pynvml module or a replacement; None imports pynvml.
    """
    with started_nvml(nvml) as library:
        if library is None:
            return None
        cuda = library.nvmlSystemGetCudaDriverVersion()
        return Driver(
            version=library.nvmlSystemGetDriverVersion(),
            # NVML encodes 12.4 as 12040.
            cuda_version=(cuda // 1000, cuda % 1000 // 10),
            num_gpus=library.nvmlDeviceGetCount(),
        )


def why_no_gpu(*, visible_devices: str | None, driver: Driver | None) -> tuple[str, str]:
    """Return what was found if no GPU is visible, and how to make GPUs visible.

    Args:
        visible_devices: CUDA_VISIBLE_DEVICES, or None if unset.
        driver: the NVIDIA driver; None if there is none.
    """
    if visible_devices is not None and _HIDING.fullmatch(visible_devices):
        hidden = f"all {driver.num_gpus} GPUs" if driver and driver.num_gpus > 1 else "every GPU"
        found = f"CUDA_VISIBLE_DEVICES={visible_devices!r}, which hides {hidden}"
        return found, "unset CUDA_VISIBLE_DEVICES, or name GPUs that nvidia-smi lists"
    found = f"NVIDIA driver {driver.version} without a GPU" if driver else "no working NVIDIA driver"
    return found, "make nvidia-smi list the GPUs: install the driver, or give them to the container or job"


def visible_indices(visible_devices: str | None, uuids: tuple[str, ...]) -> tuple[int, ...]:
    """Return the indices of the GPUs that CUDA_VISIBLE_DEVICES selects, parsed as by the CUDA driver.

    The first invalid entry ends the list, and a repeated one empties it.
    Source: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars; torch/cuda/__init__.py,
    _parse_visible_devices. Indices follow the PCI order, as in nvidia-smi.

    Args:
        visible_devices: comma-separated indices or UUIDs (or UUID prefixes), or None for all.
        uuids: the UUID of each GPU of the node.
    """
    if visible_devices is None:
        return tuple(range(len(uuids)))
    indices: list[int] = []
    for entry in visible_devices.split(","):
        index = _index(entry.strip(), uuids)
        if index is None:
            break
        if index in indices:
            return ()
        indices.append(index)
    return tuple(indices)


def _index(entry: str, uuids: tuple[str, ...]) -> int | None:
    if entry.startswith("GPU-"):
        matches = [index for index, uuid in enumerate(uuids) if uuid.startswith(entry)]
        return matches[0] if len(matches) == 1 else None
    number = re.match(r"\d+", entry)
    return int(number[0]) if number and int(number[0]) < len(uuids) else None


def check_gpu_ids(gpu_ids: tuple[int, ...], num_gpus: int, *, listed_by: str = "the driver") -> None:
    """Check that --gpu-ids names existing GPUs, each once."""
    if all(0 <= gpu_id < num_gpus for gpu_id in gpu_ids) and len(set(gpu_ids)) == len(gpu_ids):
        return
    present = {0: "none", 1: "0"}.get(num_gpus, f"0 to {num_gpus - 1}")
    raise UserError(
        "gpu-ids-unknown",
        "--gpu-ids must name GPUs of this machine, each once",
        found=f"--gpu-ids {','.join(map(str, gpu_ids))}; {listed_by} lists {present}",
        why="CUDA ignores all ids from the first invalid one on, and all of them if one is repeated",
        fix="leave out --gpu-ids, or name ids that nvidia-smi lists",
    )


_HIDING = re.compile(r"\s*(-\d.*|NoDevFiles|none|void)?\s*", re.IGNORECASE | re.DOTALL)
"""Values of CUDA_VISIBLE_DEVICES with which users and container runtimes hide all GPUs."""


def _check_there_are_none(visible_devices: str | None, root: Path) -> None:
    """Raise if a run would silently use the CPU although GPUs were requested or exist."""
    if visible_devices is not None and _HIDING.fullmatch(visible_devices):
        return
    found = f"CUDA_VISIBLE_DEVICES={visible_devices}, which names no GPU that the driver lists"
    why = "the run would silently train on the CPU"
    fix = "name GPUs by number or UUID as nvidia-smi -L lists them"
    if visible_devices is None:
        nodes = sorted((root / "dev").glob("nvidia[0-9]*"))
        if not nodes:
            return
        found = f"/dev/{nodes[0].name}, but the driver lists no working GPU"
        fix = "make nvidia-smi list the GPUs"
    else:
        why += "; parts of a GPU (MIG) are not supported yet"
    raise UserError(
        "gpus-unreadable",
        "GPUs are requested or present, but none can be read",
        found=found,
        why=why,
        fix=f"{fix}, or pass --cpu to train on the CPU",
    )


def free_gpu_bytes(*, nvml: Any = None) -> tuple[int, ...]:
    """Return the free memory of each GPU of the node; empty if unknown.

    Args:
        nvml: the pynvml module or a replacement; None imports pynvml.
    """
    with started_nvml(nvml) as library:
        if library is None:
            return ()
        try:
            handles = map(library.nvmlDeviceGetHandleByIndex, range(library.nvmlDeviceGetCount()))
            return tuple(int(library.nvmlDeviceGetMemoryInfo(handle).free) for handle in handles)
        except library.NVMLError:
            return ()


@contextmanager
def started_nvml(nvml: Any = None) -> Iterator[Any]:
    """Yield NVML, initialized, or None if the package, the library or the driver is missing.

    Args:
        nvml: the pynvml module or a replacement; None imports pynvml.
    """
    library = nvml
    with suppress(ImportError):
        import pynvml

        library = nvml or pynvml
    try:
        if library is not None:
            library.nvmlInit()
    except library.NVMLError:
        library = None
    try:
        yield library
    finally:
        if library is not None:
            library.nvmlShutdown()


def _uuid(index: int, library: Any) -> str:
    try:
        return str(library.nvmlDeviceGetUUID(library.nvmlDeviceGetHandleByIndex(index)))
    except library.NVMLError:
        return ""


def _spec(index: int, library: Any) -> GpuSpec | None:
    """Return the GPU's spec; None if it does not answer: fallen off the bus, or not accessible."""
    try:
        handle = library.nvmlDeviceGetHandleByIndex(index)
        major, minor = library.nvmlDeviceGetCudaComputeCapability(handle)
        return with_catalog_rates(
            GpuSpec(
                name=library.nvmlDeviceGetName(handle),
                memory_bytes=library.nvmlDeviceGetMemoryInfo(handle).total,
                reserved_bytes=_reserved_bytes(handle, library),
                compute_capability=(major, minor),
            )
        )
    except library.NVMLError:
        return None


def _reserved_bytes(handle: Any, library: Any) -> int:
    """Return what the driver reserves; 0 for drivers before 510, whose total already excludes it.

    Source: https://docs.nvidia.com/deploy/nvml-api/structnvmlMemory__v2__t.html
    """
    try:
        return int(library.nvmlDeviceGetMemoryInfo(handle, version=library.nvmlMemory_v2).reserved)
    except library.NVMLError:
        return 0
