"""Speeds: the achieved rates of a machine's GPUs, links, host and disks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from zerofit.core.allocation_log import COLLECTIVES, CostKind
from zerofit.core.rates import RateName, Unit
from zerofit.core.strategy import Precision

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerofit.core.facts import GpuSpec, Machine
    from zerofit.core.plan import Topology
    from zerofit.core.rates import Rate, Rates

NODE_BYTES_PER_S = 12.5e9
"""Between nodes, if Machine does not know it. ASSUMPTION: one card of 100 Gbit/s."""
NVME_READ_BYTES_PER_S = 5.6e9
NVME_WRITE_BYTES_PER_S = 4.3e9
"""One NVMe disk on PCIe 4, if Machine does not know it.
Source: https://github.com/deepspeedai/DeepSpeed/blob/master/docs/_tutorials/deepnvme.md"""
ADAM_BYTES_PER_ELEMENT = 28
"""fp32 weight, gradient and both moments read; weight and moments written."""

OVERLAP_SLOWDOWN = 0.1
"""Slowdown of computation that overlaps with communication, as a share of the communication's time.

ASSUMPTION: NCCL's kernels run on the GPU's own units and memory, beside those of the model."""


class Link(NamedTuple):
    """The achieved rate of a link, and its source."""

    bytes_per_s: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Achieved rates: of each GPU, and of a node's host and disks for all its ranks together."""

    matmul_flops_per_s: dict[Precision, float]
    grouped: float
    """Fraction of the matmul rate that products of experts reach."""
    attention_flops_per_s: dict[Precision, float]
    memory_bytes_per_s: float
    dispatch_s: float
    """CPU time of launching one operator."""
    hook_s: float
    """CPU time of ZeRO-3's hooks per module and pass."""
    gradient_hook_s: float
    """CPU time of the gradient hook of ZeRO stages 1 and 2 per parameter."""
    partition_step_s: float
    """CPU time of the optimizer step of ZeRO stages 1 and 2 per parameter."""
    compiled: float
    """Time of memory-bound operators under torch.compile, as a fraction of their eager time."""
    bus: Link | None
    """Bus bandwidth, in nccl-tests' sense, of a ring over the ranks with the same weights; None for one."""
    shards: Link | None
    """The same over the ranks that share a copy of FSDP2's weights."""
    copies: Link | None
    """The same over the ranks that hold the same shard of FSDP2's copies."""
    group: Link | None
    """From one rank to those that share its samples, in one direction; None without such ranks."""
    message_s: float
    pinned_bytes_per_s: float
    pageable_bytes_per_s: float
    """Between one GPU and the host, in each direction."""
    adam_elements_per_s: float
    """Of DeepSpeedCPUAdam, for all ranks of a node together."""
    nvme_read_bytes_per_s: float
    nvme_write_bytes_per_s: float

    def flops_per_s(self, kind: CostKind, precision: Precision) -> float:
        """Return the rate of one kind of operator on one number format."""
        table = self.attention_flops_per_s if kind is CostKind.ATTENTION else self.matmul_flops_per_s
        return table[precision] * (self.grouped if kind is CostKind.GROUPED else 1.0)


def speeds_of(machine: Machine, topology: Topology, rates: Rates) -> Speeds | None:
    """Return the speeds of a machine; None if a peak of its GPU, or of a link in use, is unknown."""
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
        dispatch_s=rates.of(RateName.DISPATCH, gpu.compute_capability, gpu=gpu.name).value,
        hook_s=rates.of(RateName.PARTITION_HOOK).value,
        gradient_hook_s=rates.of(RateName.GRADIENT_HOOK).value,
        partition_step_s=rates.of(RateName.PARTITION_STEP).value,
        compiled=rates.of(RateName.COMPILED).value,
        bus=bus,
        shards=_bus_in_copy(gpu, topology, rates) or bus,
        copies=_bus_of_copies(machine, topology, rates) or bus,
        group=group,
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
    """Return the GPU's peaks by number format; without bf16 tensor cores, bf16 runs at the fp32 rate."""
    if gpu.fp32_flops_per_s is None or gpu.fp16_flops_per_s is None:
        return None
    return {
        Precision.FP32: gpu.fp32_flops_per_s,
        Precision.FP16: gpu.fp16_flops_per_s,
        Precision.BF16: gpu.bf16_flops_per_s or gpu.fp32_flops_per_s,
    }


def _bus(machine: Machine, gpu: GpuSpec, topology: Topology, rates: Rates) -> Link | None:
    """Return the ring's bus bandwidth: the slower of the node's links and the network."""
    links: list[Link] = []
    if topology.ranks_per_node > 1:
        if (peer := _peer_link(gpu, rates)) is None:
            return None
        links.append(peer)
    if topology.num_nodes > 1:
        # Where ranks hold parts of the weights, the ranks with the same part form a ring of their own.
        rings = min(topology.world_size // topology.num_replicas, topology.ranks_per_node)
        node = _node_link(machine, rates)
        links.append(Link(node.bytes_per_s / rings, node.source))
    return min(links) if links else None


def _bus_in_copy(gpu: GpuSpec, topology: Topology, rates: Rates) -> Link | None:
    """Return the bus bandwidth in a copy of the weights that lies within a node; None if none does."""
    return _peer_link(gpu, rates) if _copies_lie_in_nodes(topology) else None


def _bus_of_copies(machine: Machine, topology: Topology, rates: Rates) -> Link | None:
    """Return the bus bandwidth between such copies, whose shards form rings of their own over the nodes."""
    if not _copies_lie_in_nodes(topology) or topology.num_nodes == 1:
        return None
    node = _node_link(machine, rates)
    return Link(node.bytes_per_s / topology.dp_shard_size, node.source)


def _copies_lie_in_nodes(topology: Topology) -> bool:
    return topology.dp_replicate_size > 1 and topology.ranks_per_node % topology.dp_shard_size == 0


def _group_link(machine: Machine, gpu: GpuSpec, topology: Topology, rates: Rates) -> Link | None:
    """Return the link from one rank to those that share its samples."""
    size = topology.sample_group_size
    if size == 1 or topology.ranks_per_node % size == 0:
        return _peer_link(gpu, rates) if size > 1 else None
    node = _node_link(machine, rates)
    words = (
        "ASSUMPTION: a group over several nodes sends all over the network, which the ranks of a node share"
    )
    return Link(node.bytes_per_s / topology.ranks_per_node, f"{node.source}; {words}")


def _peer_link(gpu: GpuSpec, rates: Rates) -> Link | None:
    if gpu.peer_bytes_per_s is None:
        return None
    name = RateName.PEER_LINK if gpu.has_fast_links else RateName.PEER_PCIE
    rate = rates.of(name, gpu.compute_capability, gpu=gpu.name)
    return Link(_achieved(rate, gpu.peer_bytes_per_s), rate.source)


def _node_link(machine: Machine, rates: Rates) -> Link:
    rate = rates.of(RateName.NODES)
    return Link(_achieved(rate, machine.node_bytes_per_s or NODE_BYTES_PER_S), rate.source)


_SENT: dict[str, Callable[[int], float]] = {
    f"{COLLECTIVES}.all_to_all.default": lambda ranks: (ranks - 1) / ranks,
    f"{COLLECTIVES}.all_gather.default": lambda ranks: ranks - 1,
    f"{COLLECTIVES}.all_gather_into.default": lambda ranks: ranks - 1,
    f"{COLLECTIVES}.all_reduce.default": lambda ranks: 2 * (ranks - 1) / ranks,
}
"""Bytes that a rank sends in a collective per byte of its input, by the number of ranks."""


def exchange_s(operator: str, num_bytes: int, ranks: int, speeds: Speeds) -> float:
    """Return the seconds of one collective of ranks that share their samples.

    Args:
        operator: as the trace names it (models/trace/parts.py).
        num_bytes: one rank's input.
        ranks: of the group.
    """
    assert speeds.group is not None
    return speeds.message_s + _SENT[operator](ranks) * num_bytes / speeds.group.bytes_per_s


def exposed_s(exchange_s: float, computation_s: float) -> float:
    """Return the seconds that overlapped communication adds to the computation."""
    return max(0.0, exchange_s - computation_s) + OVERLAP_SLOWDOWN * min(exchange_s, computation_s)
