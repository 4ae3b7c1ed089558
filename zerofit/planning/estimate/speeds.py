"""Speeds: the rates that a machine's GPUs, links, host and disks achieve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.core.allocation_log import COLLECTIVES, CostKind
from zerofit.core.rates import RateName, Unit
from zerofit.core.strategy import Precision

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerofit.core.facts import GpuSpec, Machine
    from zerofit.core.plan import Topology
    from zerofit.core.rates import Rate, Rates

NODE_BYTES_PER_S = 12.5e9
"""Between nodes where Machine does not say. ASSUMPTION: one card of 100 Gbit/s."""
NVME_READ_BYTES_PER_S = 5.6e9
NVME_WRITE_BYTES_PER_S = 4.3e9
"""One NVMe disk on PCIe 4 where Machine does not say.
Source: https://github.com/deepspeedai/DeepSpeed/blob/master/docs/_tutorials/deepnvme.md"""
ADAM_BYTES_PER_ELEMENT = 28
"""fp32 weight, gradient and both moments read; weight and moments written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Achieved rates. Those of a GPU are each GPU's own, those of the node all its ranks' together."""

    matmul_flops_per_s: dict[Precision, float]
    grouped: float
    """Share of that which products of experts reach."""
    attention_flops_per_s: dict[Precision, float]
    memory_bytes_per_s: float
    dispatch_s: float
    """CPU time that starts one operator."""
    hook_s: float
    """CPU time of ZeRO-3's hooks for one module and pass."""
    gradient_hook_s: float
    """CPU time of the hook of ZeRO's stages 1 and 2 for one parameter's gradient."""
    partition_step_s: float
    """CPU time of their step for one parameter."""
    compiled: float
    """Share of their time that memory-bound operators take under torch.compile."""
    bus_bytes_per_s: float | None
    """Of a ring over the ranks that train the same weights, in nccl-tests' sense; None for one rank."""
    bus_source: str
    group_bytes_per_s: float | None
    """Rate from one rank to those that share its samples, one direction; None where nobody does."""
    group_source: str
    message_s: float
    pinned_bytes_per_s: float
    pageable_bytes_per_s: float
    """Each direction between one GPU and the host."""
    adam_elements_per_s: float
    """Of DeepSpeedCPUAdam over the node."""
    nvme_read_bytes_per_s: float
    nvme_write_bytes_per_s: float

    def flops_per_s(self, kind: CostKind, precision: Precision) -> float:
        """Return the rate of one kind of operator on one number format."""
        table = self.attention_flops_per_s if kind is CostKind.ATTENTION else self.matmul_flops_per_s
        return table[precision] * (self.grouped if kind is CostKind.GROUPED else 1.0)


def speeds_of(machine: Machine, topology: Topology, rates: Rates) -> Speeds | None:
    """Return the speeds of a machine, or None where its GPU's peaks are not known."""
    if topology.on_cpu or not machine.gpus:
        return None
    gpu = machine.gpus[0]
    peaks = _peaks(gpu)
    if peaks is None or gpu.memory_bytes_per_s is None or gpu.host_bytes_per_s is None:
        return None
    bus = _bus(machine, gpu, topology, rates)
    group = _group_link(machine, gpu, topology, rates)
    if (bus is None and topology.num_replicas > 1) or (group is None and topology.sample_group_size > 1):
        return None

    def achieved(name: RateName, peak: float) -> float:
        return _achieved(rates.of(name, gpu.compute_capability, gpu=gpu.name), peak)

    matmul = {
        precision: achieved(
            RateName.MATMUL_FP32
            if precision is Precision.FP32 or peak == peaks[Precision.FP32]
            else RateName.MATMUL_16BIT,
            peak,
        )
        for precision, peak in peaks.items()
    }
    host_bytes_per_s = machine.host_memory_bytes_per_s or rates.of(RateName.HOST_MEMORY).value
    adam = rates.of(RateName.CPU_ADAM)
    return Speeds(
        matmul_flops_per_s=matmul,
        grouped=rates.of(RateName.GROUPED).value,
        attention_flops_per_s={
            precision: achieved(RateName.ATTENTION, peak) for precision, peak in peaks.items()
        },
        memory_bytes_per_s=achieved(RateName.DEVICE_MEMORY, gpu.memory_bytes_per_s),
        dispatch_s=rates.of(RateName.DISPATCH).value,
        hook_s=rates.of(RateName.PARTITION_HOOK).value,
        gradient_hook_s=rates.of(RateName.GRADIENT_HOOK).value,
        partition_step_s=rates.of(RateName.PARTITION_STEP).value,
        compiled=rates.of(RateName.COMPILED).value,
        bus_bytes_per_s=bus[0] if bus else None,
        bus_source=bus[1] if bus else "",
        group_bytes_per_s=group[0] if group else None,
        group_source=group[1] if group else "",
        message_s=rates.of(RateName.MESSAGE).value,
        pinned_bytes_per_s=achieved(RateName.PINNED_COPY, gpu.host_bytes_per_s),
        pageable_bytes_per_s=achieved(RateName.PAGEABLE_COPY, gpu.host_bytes_per_s),
        adam_elements_per_s=adam.value
        if adam.unit is Unit.ELEMENTS_PER_S
        else adam.value * host_bytes_per_s / ADAM_BYTES_PER_ELEMENT,
        nvme_read_bytes_per_s=_achieved(
            rates.of(RateName.NVME_READ), machine.nvme_read_bytes_per_s or NVME_READ_BYTES_PER_S
        ),
        nvme_write_bytes_per_s=_achieved(
            rates.of(RateName.NVME_WRITE), machine.nvme_write_bytes_per_s or NVME_WRITE_BYTES_PER_S
        ),
    )


def _achieved(rate: Rate, peak: float) -> float:
    return rate.value * peak if rate.unit is Unit.FRACTION else rate.value


def _peaks(gpu: GpuSpec) -> dict[Precision, float] | None:
    """Return the GPU's peaks by number format; bf16 without tensor cores for it runs at the fp32 rate."""
    if gpu.fp32_flops_per_s is None or gpu.fp16_flops_per_s is None:
        return None
    return {
        Precision.FP32: gpu.fp32_flops_per_s,
        Precision.FP16: gpu.fp16_flops_per_s,
        Precision.BF16: gpu.bf16_flops_per_s or gpu.fp32_flops_per_s,
    }


def _bus(machine: Machine, gpu: GpuSpec, topology: Topology, rates: Rates) -> tuple[float, str] | None:
    """Return the ring's bus bandwidth and its source: the slower of the node's links and the network."""
    links: list[tuple[float, str]] = []
    if topology.ranks_per_node > 1:
        if (peer := _peer_link(gpu, rates)) is None:
            return None
        links.append(peer)
    if topology.num_nodes > 1:
        # Where ranks hold parts of the weights, the same parts on all nodes make a ring of their own each.
        rings = min(topology.world_size // topology.num_replicas, topology.ranks_per_node)
        node_bytes_per_s, source = _node_link(machine, rates)
        links.append((node_bytes_per_s / rings, source))
    return min(links) if links else None


def _group_link(machine: Machine, gpu: GpuSpec, topology: Topology, rates: Rates) -> tuple[float, str] | None:
    """Return the rate at which one rank sends to those that share its samples, and its source."""
    size = topology.sample_group_size
    if size == 1 or topology.ranks_per_node % size == 0:
        return _peer_link(gpu, rates) if size > 1 else None
    node_bytes_per_s, source = _node_link(machine, rates)
    words = "ASSUMPTION: of a group over nodes all goes over the network, which the ranks of a node share"
    return node_bytes_per_s / topology.ranks_per_node, f"{source}; {words}"


def _peer_link(gpu: GpuSpec, rates: Rates) -> tuple[float, str] | None:
    if gpu.peer_bytes_per_s is None:
        return None
    name = RateName.PEER_LINK if gpu.has_fast_links else RateName.PEER_PCIE
    rate = rates.of(name, gpu.compute_capability, gpu=gpu.name)
    return _achieved(rate, gpu.peer_bytes_per_s), rate.source


def _node_link(machine: Machine, rates: Rates) -> tuple[float, str]:
    rate = rates.of(RateName.NODES)
    return _achieved(rate, machine.node_bytes_per_s or NODE_BYTES_PER_S), rate.source


_SENT: dict[str, Callable[[int], float]] = {
    f"{COLLECTIVES}.all_to_all.default": lambda ranks: (ranks - 1) / ranks,
    f"{COLLECTIVES}.all_gather.default": lambda ranks: ranks - 1,
    f"{COLLECTIVES}.all_gather_into.default": lambda ranks: ranks - 1,
    f"{COLLECTIVES}.all_reduce.default": lambda ranks: 2 * (ranks - 1) / ranks,
}
"""What a rank sends in a collective, by the bytes that it puts in."""


def exchange_s(operator: str, num_bytes: int, ranks: int, speeds: Speeds) -> float:
    """Return the seconds of one collective of ranks that share their samples.

    Args:
        operator: as the trace names it (models/trace/parts.py).
        num_bytes: what one rank puts in.
        ranks: of the group.
    """
    assert speeds.group_bytes_per_s is not None
    return speeds.message_s + _SENT[operator](ranks) * num_bytes / speeds.group_bytes_per_s
