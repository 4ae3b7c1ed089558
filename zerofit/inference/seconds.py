"""Seconds that a layout takes at the peaks of memory and links: what each pass moves and reads of weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.estimate.speeds import NODE_BYTES_PER_S, NVME_READ_BYTES_PER_S
from zerofit.inference.cache import cache_bytes_per_token
from zerofit.strategy import OffloadDevice, ZeroStage

if TYPE_CHECKING:
    from zerofit.facts import GpuSpec, Machine
    from zerofit.inference.asked import InferenceWorkload
    from zerofit.inference.device import Weights


def seconds_of(
    weights: Weights, workload: InferenceWorkload, *, batch_size: int, machine: Machine, gpu: GpuSpec | None
) -> float | None:
    """Return about how long all prompts take; None where a rate is not known, as on the CPU.

    Each call makes a pass for each new token. A pass reads all weights and half of the full cache from the
    GPU's memory. Weights that are not there whole come for each pass, whatever the batch, or once for a call
    that gathers them first. Computation is not in it, nor what overlaps: it compares layouts, no more.

    Args:
        weights: the layout.
        workload: what is generated.
        batch_size: prompts in one call on one rank.
        machine: one node.
        gpu: the smallest of it; None where the ranks run on the CPU.
    """
    moved = _moving_seconds(weights, machine, gpu)
    if gpu is None or gpu.memory_bytes_per_s is None or moved is None:
        return None
    passes = workload.max_new_tokens
    tokens = workload.longest_prompt + passes // 2
    rows = batch_size * workload.sequences_per_prompt
    read_bytes = weights.whole_bytes + rows * tokens * cache_bytes_per_token(weights.shape)
    ranks = weights.setup.topology.world_size
    calls = -(-max(1, workload.num_prompts) // (ranks * batch_size))
    times_moved = 1 if weights.is_gathered_once else passes
    return calls * (passes * read_bytes / gpu.memory_bytes_per_s + times_moved * moved)


def _moving_seconds(weights: Weights, machine: Machine, gpu: GpuSpec | None) -> float | None:
    """Return how long it takes to bring all weights to every GPU once; None where a rate is not known.

    Each rank's part comes from the disk, then from the host; parts come from all ranks over the slowest link.
    """
    strategy, topology = weights.setup.strategy, weights.setup.topology
    if strategy.zero_stage is not ZeroStage.PARAMETERS:
        return 0.0
    part = weights.whole_bytes / topology.world_size
    ways: list[tuple[float, float | None]] = []
    if strategy.param_offload is OffloadDevice.NVME:
        rate = machine.nvme_read_bytes_per_s or NVME_READ_BYTES_PER_S
        ways.append((part * topology.ranks_per_node, rate))
    if strategy.param_offload is not OffloadDevice.NONE:
        ways.append((part, gpu.host_bytes_per_s if gpu else None))
    if topology.ranks_per_node > 1:
        ways.append((weights.whole_bytes - part, gpu.peer_bytes_per_s if gpu else None))
    if topology.num_nodes > 1:
        ways.append((weights.whole_bytes - part, machine.node_bytes_per_s or NODE_BYTES_PER_S))
    seconds = [num_bytes / rate for num_bytes, rate in ways if rate is not None]
    return sum(seconds) if len(seconds) == len(ways) else None
