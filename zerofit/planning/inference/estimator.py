"""A generation as strategies for `search`: where the weights lie, the batch, and what each needs."""

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
from zerofit.planning.search import needs_words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.core.estimates import MemoryEstimate
    from zerofit.core.facts import GpuSpec, Machine
    from zerofit.planning.inference.memory import Weights
    from zerofit.planning.inference.problem import InferenceWorkload

MAX_BATCH = 32
"""The largest batch that is chosen where the weights stay. ASSUMPTION: 32 rows already compute for a part of
the time in which the weights are read, and a kill loses the call that it ends. Where weights are moved for
each pass a call takes as long whatever its batch, so that the memory alone bounds that."""
_KINDS = (
    (ZeroStage.NOTHING, OffloadDevice.NONE),
    (ZeroStage.PARAMETERS, OffloadDevice.NONE),
    (ZeroStage.PARAMETERS, OffloadDevice.CPU),
    (ZeroStage.PARAMETERS, OffloadDevice.NVME),
)
"""In the order of time that a pass takes: nothing is sent, weights are gathered, they come from host memory,
from the disk. A larger batch, for which a later one has room, may turn that over."""


def layouts(problem: InferenceProblem) -> tuple[Strategy, ...]:
    """Return the ways to lay a model out that the flags leave open, the preferred one first; never empty."""
    request, found = problem.request, []
    for stage, offload in _KINDS:
        is_said = request.param_offload is offload
        if request.zero_stage not in (None, stage) or not (request.param_offload is None or is_said):
            continue
        offloads = offload is not OffloadDevice.NONE
        if problem.on_cpu and offloads and not is_said and request.nvme_path is None:
            continue  # the weights are in host memory as it is, mapped from the disk where nothing casts them
        is_partitioned = stage is ZeroStage.PARAMETERS
        is_alone = is_partitioned and not offloads and problem.topology(stage).world_size == 1
        if is_alone and request.zero_stage is not ZeroStage.PARAMETERS:
            continue  # a single rank's part is the whole model
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
    """Yield the batches to try, falling: what each rank has, and powers of two below it, in even calls.

    Of as many calls, the smallest batch that makes them: 17 and 16 of 33 prompts, not 32 and one.

    Args:
        most: the largest batch; None for no bound.
    """
    each = max(1, -(-num_prompts // num_ranks))
    size, before = min(each, most or each), 0
    while size:
        even = -(-each // -(-each // size))
        if even != before:
            yield even
        before = even
        size = 1 << ((size - 1).bit_length() - 1) if size > 1 else 0


class InferenceEstimator:
    """Estimates a generation's strategies for `search`; their micro-batch is the prompts of one call."""

    def __init__(self, problem: InferenceProblem) -> None:
        self._problem = problem
        self._weights: dict[Strategy, Weights] = {}
        self._hosts: dict[Strategy, MemoryEstimate] = {}
        self._estimated: dict[Strategy, InferenceCandidate] = {}

    def strategies(self) -> list[Strategy]:
        """Return every layout with every batch to try, the smallest first."""
        request, found = self._problem.request, []
        for layout in layouts(self._problem):
            ranks = self._problem.topology(layout.zero_stage).world_size
            most = None if self._weights_of(layout).move_each_pass else MAX_BATCH
            sizes = batch_sizes(self._problem.workload.num_prompts, ranks, most=most)
            said = request.micro_batch_size
            found += [replace(layout, micro_batch_size=one) for one in ([said] if said else sorted(sizes))]
        return found

    def least_bytes(self, strategy: Strategy) -> int:
        """Return 0: each estimate is quick, so that no bound spares one."""
        return 0

    least_live_bytes = least_played_bytes = least_bytes

    def seconds(self, strategy: Strategy) -> float | None:
        """Return about how long all prompts take."""
        problem = self._problem
        return seconds_of(
            self._weights_of(strategy),
            problem.workload,
            batch_size=strategy.micro_batch_size or 1,
            machine=problem.machine,
            gpu=problem.gpu,
        )

    def fits(self, strategy: Strategy) -> bool:
        """Return True if a batch surely fits; one prompt, or a flag's batch, may fit closely."""
        candidate = self.estimate(strategy)
        has_choice = self._problem.request.micro_batch_size is None and candidate.batch_size > 1
        return candidate.fits and not (has_choice and self._problem.is_close(candidate))

    def has_room(self, strategy: Strategy) -> bool:
        """Return True: a batch that may not fit is refused by fits(), but for those that leave no choice."""
        return True

    def has_gpu_room(self, strategy: Strategy) -> bool:
        """Return True, as has_room() does."""
        return True

    def estimate(self, strategy: Strategy) -> InferenceCandidate:
        """Return the strategy with its estimates, and what of them does not fit."""
        if strategy not in self._estimated:
            self._estimated[strategy] = self._candidate(strategy)
        return self._estimated[strategy]

    def _candidate(self, strategy: Strategy) -> InferenceCandidate:
        problem, weights = self._problem, self._weights_of(strategy)
        device, batch_size = None, strategy.micro_batch_size or 1
        if problem.gpu is not None:
            device = device_memory(weights, problem.workload, batch_size=batch_size, gpu=problem.gpu)
        host = self._host(strategy)
        lacks, excess = [], [host.peak_bytes / max(1, problem.host_bytes)]
        if device is not None:
            excess.append(device.peak_bytes / max(1, problem.device_bytes))
            if device.peak_bytes > problem.device_bytes:
                lacks.append(needs_words(device, problem.device_bytes, "on each GPU"))
        if host.peak_bytes > problem.host_bytes:
            lacks.append(needs_words(host, problem.host_bytes, "of host memory"))
        if strategy.uses_nvme and strategy.nvme_path is None:
            lacks.append("needs --nvme-path, a folder on an NVMe disk")
            excess.append(math.inf)
        elif strategy.uses_nvme:
            needed, there = nvme_bytes_needed(weights.setup), problem.machine.nvme_bytes
            if 0 < there < needed:
                lacks.append(f"needs {format_bytes(needed)} of {format_bytes(there)} on the NVMe disk")
        return InferenceCandidate(
            strategy=strategy,
            shortage="; ".join(lacks),
            excess=max(excess) if lacks else 0.0,
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
            layout = replace(layout, param_offload=OffloadDevice.NONE)  # it is host memory either way
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
        """Return a node's host memory, which is the same for every batch where the ranks run on GPUs."""
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
    """Return about how long all prompts take; None where a rate is not known, as on the CPU.

    Each call makes a pass for each new token. A pass reads all weights and half of the full cache from the
    GPU's memory. Weights that are not there whole come for each pass, whatever the batch, or once for a call
    that gathers them first. Computation is not in it, nor what overlaps: it compares layouts, no more.
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
