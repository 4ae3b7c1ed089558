"""The NVIDIA GPUs, through the driver's management library (NVML): no torch, and no CUDA context."""

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

    Name, memory, compute capability and links are what the driver says; the catalog adds the rates of the
    GPUs that it knows.

    Args:
        gpu_ids: the ids the user asked for; they take the place of visible_devices, as accelerate puts them
            there. None asks for nothing.
        visible_devices: CUDA_VISIBLE_DEVICES, or None where it is not set.
        may_be_unreadable: whether GPUs that are there and can't be read are taken for none.
        root: the file-system root that /dev is looked for under.
        nvml: the pynvml module, or one like it; None imports pynvml.

    Raises:
        UserError: an id is not there, or stands twice; or there are GPUs, none of which can be read.
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
    """Return what the NVIDIA driver says of itself, or None where there is none.

    Args:
        nvml: the pynvml module, or one like it; None imports pynvml.
    """
    with started_nvml(nvml) as library:
        if library is None:
            return None
        cuda = library.nvmlSystemGetCudaDriverVersion()
        return Driver(
            version=library.nvmlSystemGetDriverVersion(),
            # NVML writes 12.4 as 12040.
            cuda_version=(cuda // 1000, cuda % 1000 // 10),
            num_gpus=library.nvmlDeviceGetCount(),
        )


def why_no_gpu(*, visible_devices: str | None, driver: Driver | None) -> tuple[str, str]:
    """Return what was found where no GPU is visible, and what to do so that GPUs are.

    Args:
        visible_devices: CUDA_VISIBLE_DEVICES, or None where it is not set.
        driver: what the NVIDIA driver says of itself; None where none answers.
    """
    if visible_devices is not None and _HIDING.fullmatch(visible_devices):
        hidden = f"all {driver.num_gpus} GPUs" if driver and driver.num_gpus > 1 else "every GPU"
        found = f"CUDA_VISIBLE_DEVICES={visible_devices!r}, which hides {hidden}"
        return found, "unset CUDA_VISIBLE_DEVICES, or name GPUs that nvidia-smi lists"
    found = (
        f"NVIDIA driver {driver.version}, which lists no GPU" if driver else "no NVIDIA driver that answers"
    )
    return found, "make nvidia-smi list the GPUs: install the driver, or give them to the container or job"


def visible_indices(visible_devices: str | None, uuids: tuple[str, ...]) -> tuple[int, ...]:
    """Return which GPUs CUDA_VISIBLE_DEVICES leaves visible, read as the CUDA driver reads it.

    The first entry that names no GPU ends the list, and one that repeats a GPU empties it.
    Source: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars; torch/cuda/__init__.py,
    _parse_visible_devices. Indices follow the PCI order, as in nvidia-smi.

    Args:
        visible_devices: indices or UUIDs (their beginnings do) with commas between, or None for all.
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
    """Check that --gpu-ids names GPUs that are there, each once."""
    if all(0 <= gpu_id < num_gpus for gpu_id in gpu_ids) and len(set(gpu_ids)) == len(gpu_ids):
        return
    present = {0: "none", 1: "0"}.get(num_gpus, f"0 to {num_gpus - 1}")
    raise UserError(
        "gpu-ids-unknown",
        "--gpu-ids must name GPUs of this machine, each once",
        found=f"--gpu-ids {','.join(map(str, gpu_ids))}; {listed_by} lists {present}",
        why="CUDA drops the ids from the first wrong one on, and all of them where one stands twice",
        fix="leave out --gpu-ids, or name ids that nvidia-smi lists",
    )


_HIDING = re.compile(r"\s*(-\d.*|NoDevFiles|none|void)?\s*", re.IGNORECASE | re.DOTALL)
"""Values of CUDA_VISIBLE_DEVICES by which users and container runtimes hide every GPU."""


def _check_there_are_none(visible_devices: str | None, root: Path) -> None:
    """Raise where a run would land on the CPU though GPUs were asked for, or are there."""
    if visible_devices is not None and _HIDING.fullmatch(visible_devices):
        return
    found = f"CUDA_VISIBLE_DEVICES={visible_devices}, which names no GPU that the driver lists"
    why = "the run would train on the CPU without a word"
    fix = "name GPUs by number or UUID as nvidia-smi -L lists them"
    if visible_devices is None:
        nodes = sorted((root / "dev").glob("nvidia[0-9]*"))
        if not nodes:
            return
        found = f"/dev/{nodes[0].name}, and the driver lists no GPU that answers"
        fix = "make nvidia-smi list the GPUs"
    else:
        why += "; parts of a GPU (MIG) are not understood yet"
    raise UserError(
        "gpus-unreadable",
        "GPUs are asked for or present, and none can be read",
        found=found,
        why=why,
        fix=f"{fix}, or say --cpu to train on the CPU",
    )


def free_gpu_bytes(*, nvml: Any = None) -> tuple[int, ...]:
    """Return the free memory of each GPU of the node; nothing where the driver does not tell.

    Args:
        nvml: the pynvml module, or one like it; None imports pynvml.
    """
    with started_nvml(nvml) as library:
        if library is None:
            return ()
        try:
            handles = map(library.nvmlDeviceGetHandleByIndex, range(library.nvmlDeviceGetCount()))
            return tuple(int(library.nvmlDeviceGetMemoryInfo(one).free) for one in handles)
        except library.NVMLError:
            return ()


@contextmanager
def started_nvml(nvml: Any = None) -> Iterator[Any]:
    """Yield NVML, started, or None where the package, the library or the driver is missing.

    Args:
        nvml: the pynvml module, or one like it; None imports pynvml.
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
    """Return the GPU's spec; None where it does not answer, as one that fell off the bus or is not ours."""
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
    """Return what the driver keeps; 0 for a driver before 510, whose total is what is left beside it.

    Source: https://docs.nvidia.com/deploy/nvml-api/structnvmlMemory__v2__t.html
    """
    try:
        return int(library.nvmlDeviceGetMemoryInfo(handle, version=library.nvmlMemory_v2).reserved)
    except library.NVMLError:
        return 0
