"""Rates: what a machine achieves of its peaks, each with its source."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RateName(StrEnum):
    """The resource of a rate. Fractions are of the peaks in GpuSpec or Machine."""

    MATMUL_16BIT = "matrix products in 16 bit"
    """Of fp16_flops_per_s or bf16_flops_per_s."""
    MATMUL_FP32 = "matrix products in fp32"
    """Of fp32_flops_per_s: torch disables tf32 for matrix products by default."""
    GROUPED = "products of experts"
    """Of the rate of other matrix products."""
    ATTENTION = "attention kernels"
    """Flash or memory-efficient attention; of the peak of their number format."""
    DEVICE_MEMORY = "device memory"
    """Of memory_bytes_per_s."""
    DISPATCH = "dispatch of an operator"
    """Seconds of Python and dispatch overhead per operator."""
    PEER_LINK = "all-reduce over NVLink"
    """Bus bandwidth of NCCL, of peer_bytes_per_s."""
    PEER_PCIE = "all-reduce over PCIe"
    """Bus bandwidth of NCCL, of peer_bytes_per_s."""
    NODES = "all-reduce between nodes"
    """Bus bandwidth of NCCL, of node_bytes_per_s."""
    MESSAGE = "message"
    """Latency of a collective in seconds."""
    PINNED_COPY = "copy from and to pinned memory"
    """Of host_bytes_per_s."""
    PAGEABLE_COPY = "copy from and to pageable memory"
    """Of host_bytes_per_s."""
    HOST_MEMORY = "host memory"
    """Bytes per second of one node if Machine doesn't say."""
    CPU_ADAM = "CPU Adam"
    """Of host_memory_bytes_per_s, counting 28 bytes an element: four fp32 numbers read, three written."""
    NVME_READ = "NVMe read"
    """Of nvme_read_bytes_per_s."""
    NVME_WRITE = "NVMe write"
    """Of nvme_write_bytes_per_s."""
    PARTITION_HOOK = "gather of a module"
    """Python overhead in seconds of ZeRO-3's hooks, per module with parameters and pass."""
    GRADIENT_HOOK = "hook of a gradient"
    """Python overhead in seconds of ZeRO-1 and ZeRO-2's hooks, per parameter and backward pass that reduces
    gradients."""
    PARTITION_STEP = "step of a parameter"
    """Python overhead in seconds of ZeRO-1 and ZeRO-2's optimizer step, per parameter."""
    COMPILED = "torch.compile"
    """Remaining share of the time of memory-bound operators after torch.compile."""


class Unit(StrEnum):
    """The unit of a rate's number."""

    FRACTION = "fraction"
    """Of a peak."""
    FLOPS_PER_S = "flops/s"
    BYTES_PER_S = "bytes/s"
    ELEMENTS_PER_S = "elements/s"
    """Parameters updated per second, by all ranks of a node together."""
    SECONDS = "s"


class Basis(StrEnum):
    """Origin of a rate."""

    PUBLISHED = "published"
    """Measured by others; the source says where."""
    ASSUMPTION = "assumption"
    MEASURED = "measured"
    """Measured by a calibration on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One achieved rate."""

    name: RateName
    value: float
    unit: Unit
    basis: Basis
    source: str
    """A link, how it was measured, or why it is assumed."""
    least_compute_capability: tuple[int, int] = (0, 0)
    """The oldest GPU generation that it holds for; a newer generation's own rate takes precedence."""
    gpus: tuple[str, ...] = ()
    """The driver's product names of the one GPU that it holds for, where it takes precedence over its
    generation's rate; empty if it holds for the whole generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The measured rates of one machine, and those that could not be measured."""

    rates: tuple[Rate, ...]
    left_out: tuple[str, ...]
    """Rates that were not measured, with reasons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """All rates that are known of one machine."""

    rates: tuple[Rate, ...]
    """In order of precedence: rates measured on this machine come first."""

    def of(self, name: RateName, compute_capability: tuple[int, int] | None = None, *, gpu: str = "") -> Rate:
        """Return a rate: the one measured here, else this GPU's, else its generation's.

        The generation is the newest that is not newer than the GPU's.

        Args:
            name: the resource.
            compute_capability: the GPU's; None means the oldest generation.
            gpu: the driver's product name; empty if no GPU is involved.

        Raises:
            KeyError: there is none.
        """
        capability = compute_capability or (0, 0)
        fit = [
            rate
            for rate in self.rates
            if rate.name is name and (rate.basis is Basis.MEASURED or _holds(rate, capability, gpu))
        ]
        if not fit:
            raise KeyError(name)
        return max(fit, key=_precedence)


def _holds(rate: Rate, capability: tuple[int, int], gpu: str) -> bool:
    return rate.least_compute_capability <= capability and (not rate.gpus or gpu in rate.gpus)


def _precedence(rate: Rate) -> tuple[bool, bool, tuple[int, int]]:
    return rate.basis is Basis.MEASURED, bool(rate.gpus), rate.least_compute_capability
