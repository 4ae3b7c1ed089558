"""Rates: what a machine achieves of its peaks, each number with its source."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RateName(StrEnum):
    """The resource of a rate. Fractions are of the peak that GpuSpec or Machine states."""

    MATMUL_16BIT = "matrix products in 16 bit"
    """Of fp16_flops_per_s or bf16_flops_per_s."""
    MATMUL_FP32 = "matrix products in fp32"
    """Of fp32_flops_per_s: torch leaves tf32 off for matrix products."""
    GROUPED = "products of experts"
    """Of what other matrix products achieve."""
    ATTENTION = "attention kernels"
    """Flash or memory-efficient; of the peak of their number format."""
    DEVICE_MEMORY = "device memory"
    """Of memory_bytes_per_s."""
    DISPATCH = "dispatch of an operator"
    """Seconds that the Python process needs to start one operator's kernel."""
    PEER_LINK = "all-reduce over NVLink"
    """Bus bandwidth of NCCL, of peer_bytes_per_s."""
    PEER_PCIE = "all-reduce over PCIe"
    """Bus bandwidth of NCCL, of peer_bytes_per_s."""
    NODES = "all-reduce between nodes"
    """Bus bandwidth of NCCL, of node_bytes_per_s."""
    MESSAGE = "message"
    """Seconds that a collective takes however small it is."""
    PINNED_COPY = "copy from and to pinned memory"
    """Of host_bytes_per_s."""
    PAGEABLE_COPY = "copy from and to pageable memory"
    """Of host_bytes_per_s."""
    HOST_MEMORY = "host memory"
    """Bytes a second of one node where Machine does not say."""
    CPU_ADAM = "CPU Adam"
    """Of host_memory_bytes_per_s, counting 28 bytes an element: four fp32 numbers read, three written."""
    NVME_READ = "NVMe read"
    """Of nvme_read_bytes_per_s."""
    NVME_WRITE = "NVMe write"
    """Of nvme_write_bytes_per_s."""
    PARTITION_HOOK = "gather of a module"
    """Seconds that ZeRO-3's hooks take in Python for each module that holds parameters, each pass."""
    GRADIENT_HOOK = "hook of a gradient"
    """Seconds that the hooks of ZeRO's stages 1 and 2 take in Python for each parameter, each backward pass
    that reduces gradients."""
    PARTITION_STEP = "step of a parameter"
    """Seconds that the step of ZeRO's stages 1 and 2 takes in Python for each parameter."""
    COMPILED = "torch.compile"
    """Share of the time of memory-bound operators that remains."""


class Unit(StrEnum):
    """The unit of a rate's number."""

    FRACTION = "fraction"
    """Of a peak."""
    FLOPS_PER_S = "flops/s"
    BYTES_PER_S = "bytes/s"
    ELEMENTS_PER_S = "elements/s"
    """Parameters stepped, by all ranks of a node together."""
    SECONDS = "s"


class Basis(StrEnum):
    """Where a rate is from."""

    PUBLISHED = "published"
    """Somebody measured it, and the source says where."""
    ASSUMPTION = "assumption"
    MEASURED = "measured"
    """By a calibration on this very machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One number: what is achieved."""

    name: RateName
    value: float
    unit: Unit
    basis: Basis
    source: str
    """A link, how it was measured, or why it is assumed."""
    least_compute_capability: tuple[int, int] = (0, 0)
    """The oldest generation of GPUs that it holds for; a newer one's own rate goes before it."""
    gpus: tuple[str, ...] = ()
    """The driver's product names of the one GPU that it holds for, and there before its generation's rate;
    empty where it holds for all of its generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The measured rates of one machine, and those that could not be measured."""

    rates: tuple[Rate, ...]
    left_out: tuple[str, ...]
    """Rates that were not measured, each with its reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """All rates that are known of one machine."""

    rates: tuple[Rate, ...]
    """Rates measured on this machine come first."""

    def of(self, name: RateName, compute_capability: tuple[int, int] | None = None, *, gpu: str = "") -> Rate:
        """Return a rate: the one measured here, else this GPU's own, else its generation's.

        That of a generation is the rate of the nearest one that is not newer than the GPU's.

        Args:
            name: what the rate is of.
            compute_capability: the GPU's; None stands for the oldest generation.
            gpu: the driver's product name of it; empty where the rate is of no GPU.

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
