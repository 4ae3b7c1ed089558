"""The estimator of generation for the search: layouts, batches, and the memory and time of each."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.core.strategy import Engine, OffloadDevice, Strategy, ZeroStage
from zerofit.core.units import format_bytes
from zerofit.planning.estimate.host_memory import nvme_bytes_needed
from zerofit.planning.estimate.speeds import NODE_BYTES_PER_S, NVME_READ_BYTES_PER_S
from zerofit.planning.inference.activations import cache_bytes_per_token
from zerofit.planning.inference.memory import (
    device_memory,
    host_memory,
    swap_buffer_elements,
    weights_of,
)
from zerofit.planning.inference.problem import InferenceCandidate, InferenceProblem
from zerofit.planning.search import Estimator, shortage_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.core.estimates import MemoryEstimate
    from zerofit.core.facts import GpuSpec, Machine
    from zerofit.planning.inference.memory import Weights
    from zerofit.planning.inference.problem import InferenceWorkload

MAX_BATCH = 32
"""The largest batch that is chosen if the weights stay on the GPU. ASSUMPTION: at 32 rows the
time to compute is no longer negligible beside that to read the weights, and a killed run loses its current
call. If weights are moved for each pass, a call takes as long whatever its batch: only memory limits it."""
_PLACEMENTS = (
    (ZeroStage.NOTHING, OffloadDevice.NONE),
    (ZeroStage.PARAMETERS, OffloadDevice.NONE),
    (ZeroStage.PARAMETERS, OffloadDevice.CPU),
    (ZeroStage.PARAMETERS, OffloadDevice.NVME),
)
"""In order of the time per pass: no transfer, weights gathered from other ranks, from host memory, from NVMe.
A later one that fits a larger batch may still be faster in total."""


def layouts(problem: InferenceProblem) -> tuple[Strategy, ...]:
    """Return the layouts that the flags allow, the preferred one first; never empty."""
    request, found = problem.request, []
    for stage, offload in _PLACEMENTS:
        is_said = request.param_offload is offload
        if request.zero_stage not in (None, stage) or not (request.param_offload is None or is_said):
            continue
        offloads = offload is not OffloadDevice.NONE
        if problem.on_cpu and offloads and not is_said and request.nvme_path is None:
            continue  # the weights are in host memory anyway
        is_partitioned = stage is ZeroStage.PARAMETERS
        is_alone = is_partitioned and not offloads and problem.topology(stage).world_size == 1
        if is_alone and request.zero_stage is not ZeroStage.PARAMETERS:
            continue  # a single rank's shard is the whole model
        strategy = Strategy(
            engine=Engine.DEEPSPEED if is_partitioned else Engine.NATIVE,
            zero_stage=stage,
            param_offload=offload,
            nvme_path=request.nvme_path if offload is OffloadDevice.NVME else None,
            precision=problem.precision,
        )
        found.append(strategy)
    return tuple(found)


def batch_sizes(num_prompts: int, num_ranks: int, *, most: int | None = None) -> Iterator[int]:
    """Yield the batch sizes to try, largest first: all prompts of a rank, then smaller ones by powers of two.

    Each is reduced to split the prompts evenly over its calls: 33 prompts are 17 and 16, not 32 and 1.

    Args:
        most: the largest batch; None for no limit.
    """
    each = max(1, -(-num_prompts // num_ranks))
    size, before = min(each, most or each), 0
    while size:
        even = -(-each // -(-each // size))
        if even != before:
            yield even
        before = even
        size = 1 << ((size - 1).bit_length() - 1) if size > 1 else 0


class InferenceEstimator(Estimator[InferenceCandidate]):
    """Estimates a generation's strategies, whose micro-batch is the prompts of one call.

    Each estimate is cheap, so there are no bounds.
    """

    def __init__(self, problem: InferenceProblem) -> None:
        self._problem = problem
        self._weights: dict[Strategy, Weights] = {}
        self._hosts: dict[Strategy, MemoryEstimate] = {}
        self._estimated: dict[Strategy, InferenceCandidate] = {}

    def strategies(self) -> list[Strategy]:
        """Return every layout with every batch to try, the smallest batch first."""
        request, found = self._problem.request, []
        for layout in layouts(self._problem):
            ranks = self._problem.topology(layout.zero_stage).world_size
            most = None if self._weights_of(layout).move_each_pass else MAX_BATCH
            sizes = batch_sizes(self._problem.workload.num_prompts, ranks, most=most)
            said = request.micro_batch_size
            found += [replace(layout, micro_batch_size=one) for one in ([said] if said else sorted(sizes))]
        return found

    def seconds(self, strategy: Strategy) -> float | None:
        """Return the approximate time of all prompts."""
        problem = self._problem
        return seconds_of(
            self._weights_of(strategy),
            problem.workload,
            batch_size=strategy.micro_batch_size or 1,
            machine=problem.machine,
            gpu=problem.gpu,
        )

    def fits(self, strategy: Strategy) -> bool:
        """Return True if a batch surely fits; a single prompt, or the batch of a flag, may fit closely."""
        candidate = self.estimate(strategy)
        can_shrink = self._problem.request.micro_batch_size is None and candidate.batch_size > 1
        return candidate.fits and not (can_shrink and self._problem.is_close(candidate))

    def estimate(self, strategy: Strategy) -> InferenceCandidate:
        """Return the strategy with its estimates and its shortage."""
        if strategy not in self._estimated:
            self._estimated[strategy] = self._candidate(strategy)
        return self._estimated[strategy]

    def _candidate(self, strategy: Strategy) -> InferenceCandidate:
        problem, weights = self._problem, self._weights_of(strategy)
        device, batch_size = None, strategy.micro_batch_size or 1
        if problem.gpu is not None:
            device = device_memory(weights, problem.workload, batch_size=batch_size, gpu=problem.gpu)
        host = self._host(strategy)
        shortages, excess = [], [host.peak_bytes / max(1, problem.host_bytes)]
        if device is not None:
            excess.append(device.peak_bytes / max(1, problem.device_bytes))
            if device.peak_bytes > problem.device_bytes:
                shortages.append(shortage_text(device, problem.device_bytes, "on each GPU"))
        if host.peak_bytes > problem.host_bytes:
            shortages.append(shortage_text(host, problem.host_bytes, "of host memory"))
        if strategy.uses_nvme and strategy.nvme_path is None:
            shortages.append("needs --nvme-path, a folder on an NVMe disk")
            excess.append(math.inf)
        elif strategy.uses_nvme:
            needed, available = nvme_bytes_needed(weights.setup), problem.machine.nvme_bytes
            if 0 < available < needed:
                excess.append(needed / available)
                shortages.append(
                    f"needs {format_bytes(needed)} of {format_bytes(available)} on the NVMe disk"
                )
        return InferenceCandidate(
            strategy=strategy,
            shortage="; ".join(shortages),
            excess=max(excess) if shortages else 0.0,
            topology=problem.topology(strategy.zero_stage),
            device=device,
            host=host,
            nvme_buffer_elements=swap_buffer_elements(weights),
            seconds=self.seconds(strategy),
        )

    def _weights_of(self, strategy: Strategy) -> Weights:
        problem = self._problem
        layout = replace(strategy, micro_batch_size=None)
        if problem.on_cpu and layout.param_offload is OffloadDevice.CPU:
            layout = replace(layout, param_offload=OffloadDevice.NONE)  # host memory either way
        if layout not in self._weights:
            self._weights[layout] = weights_of(
                problem.model,
                layout,
                problem.topology(layout.zero_stage),
                versions=problem.versions,
                gather=problem.workload.gather,
                gpu=problem.gpu,
            )
        return self._weights[layout]

    def _host(self, strategy: Strategy) -> MemoryEstimate:
        """Return a node's host memory, which depends on the batch only if the ranks run on the CPU."""
        problem = self._problem
        alike = strategy if problem.on_cpu else replace(strategy, micro_batch_size=None)
        if alike not in self._hosts:
            self._hosts[alike] = host_memory(
                self._weights_of(strategy),
                problem.workload,
                model=problem.model,
                machine=problem.machine,
                batch_size=strategy.micro_batch_size or 1,
            )
        return self._hosts[alike]


def seconds_of(
    weights: Weights, workload: InferenceWorkload, *, batch_size: int, machine: Machine, gpu: GpuSpec | None
) -> float | None:
    """Return the approximate time of all prompts; None if a rate is unknown, as on the CPU.

    Each call makes one pass per new token. A pass reads all weights and half of the full cache from GPU
    memory. Partitioned or offloaded weights are moved for each pass, or once per call if it gathers them
    first. Computation and overlap are left out: the time serves to compare layouts.
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
    """Return the time to bring all weights to every GPU once; None if a rate is unknown.

    Each rank's shard comes from the disk, then from the host; shards are gathered over the slowest link.
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
