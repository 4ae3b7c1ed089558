"""Stands for pynvml: no machine of the test suite has a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TypeVar

from zerofit.core.units import GIB

_Value = TypeVar("_Value")


class NvmlError(Exception):
    """What pynvml raises."""


@dataclass
class FakeNvml:
    """A node with four GPUs, one of them lost; None is what the driver does not tell."""

    has_driver: bool = True
    product_names: dict[str | None, str] = field(default_factory=dict)
    """What other than A or B the GPUs are called."""
    processes: dict[int, int | None] | None = field(default_factory=dict)
    """Memory by process id."""
    generation: int | None = None
    """Of PCIe."""
    num_lanes: int = 16
    joined: frozenset[frozenset[int]] | None = None
    """The pairs of GPUs between which NVLink can be used."""
    num_links: int = 0
    wire_mb_per_s: int | None = None
    names: tuple[str | None, ...] = ("A", "A", "B", None)
    num_started: int = 0

    NVMLError = NvmlError
    NVML_SUCCESS = 0
    NVML_FEATURE_ENABLED = 1
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0
    NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON = 90
    NVML_NVLINK_MAX_LINKS = 36
    nvmlMemory_v2 = 2  # noqa: N815

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.has_driver:
            raise NvmlError("Driver Not Loaded")
        self.num_started += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.num_started -= 1

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "550.54.15"

    def nvmlSystemGetCudaDriverVersion(self) -> int:  # noqa: N802
        return 12040

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if self.names[index] is None:
            raise NvmlError("GPU is lost")
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return ("GPU-aaaa1111", "GPU-aaaa2222", "GPU-bbbb3333")[handle]

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        name = self.names[handle]
        return f"NVIDIA {self.product_names.get(name, name)}"

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int = 1) -> SimpleNamespace:  # noqa: N802
        if self.names[handle] == "A":
            reserved = {"reserved": GIB} if version == 2 else {}
            return SimpleNamespace(total=80 * GIB, free=(79 - 10 * handle) * GIB, **reserved)
        if version == 2:
            raise NvmlError("Function Not Found")
        return SimpleNamespace(total=24 * GIB, free=20 * GIB)

    def nvmlDeviceGetComputeRunningProcesses(self, _handle: int) -> list[SimpleNamespace]:  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in _told(self.processes).items()]

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:  # noqa: N802
        return (8, 0) if self.names[handle] == "A" else (7, 5)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:  # noqa: N802
        return _told(self.generation)

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:  # noqa: N802
        return self.num_lanes

    def nvmlDeviceGetP2PStatus(self, handle: int, other: int, capability: int) -> int:  # noqa: N802
        assert capability == self.NVML_P2P_CAPS_INDEX_NVLINK
        return 0 if frozenset({handle, other}) in _told(self.joined) else 5

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> list[SimpleNamespace]:  # noqa: N802
        assert fields == [self.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON]
        if self.wire_mb_per_s is None:
            return [SimpleNamespace(nvmlReturn=3, value=SimpleNamespace(uiVal=0))]
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=self.wire_mb_per_s))]

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:  # noqa: N802
        if link >= self.num_links + 2:
            raise NvmlError("Invalid Argument")
        return int(link < self.num_links)


def _told(value: _Value | None) -> _Value:
    if value is None:
        raise NvmlError("Not Supported")
    return value
