"""best_candidates: of each layout the largest batch that fits, or what its smallest one lacks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zerofit.core.strategy import OffloadDevice, ZeroStage
from zerofit.core.units import format_bytes
from zerofit.planning.estimate.host_memory.node import nvme_bytes_needed
from zerofit.planning.estimate.time.speeds import NODE_BYTES_PER_S, NVME_READ_BYTES_PER_S
from zerofit.planning.inference.cache import cache_bytes_per_token
from zerofit.planning.inference.device import device_memory, weights_of
from zerofit.planning.inference.host import host_memory, surely_bytes, swap_buffer_elements
from zerofit.planning.inference.layouts import layouts
from zerofit.planning.inference.planned import Candidate, needs_words
from zerofit.planning.problem import DEFAULT_RESERVE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zerofit.core.estimates import MemoryEstimate
    from zerofit.core.facts import GpuSpec, Machine, ModelFacts, Versions
    from zerofit.core.strategy import Precision
    from zerofit.planning.inference.device import Weights
    from zerofit.planning.inference.layouts import Layout
    from zerofit.planning.inference.request import InferenceRequest, InferenceWorkload

MAX_BATCH = 32
"""The largest batch that is chosen where the weights stay. ASSUMPTION: 32 rows already compute for a part of
the time in which the weights are read, and a kill loses the call that it ends. Where weights are moved for
each pass a call takes as long whatever its batch, so that the memory alone bounds that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be planned."""

    model: ModelFacts
    machine: Machine
    versions: Versions
    workload: InferenceWorkload
    request: InferenceRequest
    precision: Precision
    """Of the weights: the request's, or the one that was chosen."""

    @property
    def gpu(self) -> GpuSpec | None:
        """The GPU that decides what fits; None where the ranks run on the CPU."""
        if self.request.on_cpu or not self.machine.gpus:
            return None
        return min(self.machine.gpus, key=lambda gpu: gpu.usable_bytes)

    @property
    def device_bytes(self) -> int:
        """What of that GPU may be taken."""
        return int(self.gpu.usable_bytes * (1 - DEFAULT_RESERVE)) if self.gpu else 0

    @property
    def host_bytes(self) -> int:
        """What of a node's host memory may be taken."""
        return self.machine.host_memory_available_bytes


def best_candidates(question: Question) -> tuple[Candidate, ...]:
    """Return one candidate of each layout, in the order of preference."""
    found = layouts(question.machine, question.workload, question.request, question.precision)
    return tuple(_best(question, layout) for layout in found)


def _best(question: Question, layout: Layout) -> Candidate:
    """Return a layout with its largest batch that surely fits; with a single prompt it may fit closely."""
    weigh = _Weigher(question, layout)
    said = question.request.batch_size
    if said is not None:
        return weigh.candidate(said)
    most = None if weigh.weights_move else MAX_BATCH
    for size in batch_sizes(question.workload.num_prompts, layout.topology.world_size, most=most):
        candidate = weigh.candidate(size)
        if size == 1 or (candidate.fits and not is_close(candidate, question)):
            return candidate
    raise AssertionError("the smallest batch is 1")


def batch_sizes(num_prompts: int, num_ranks: int, *, most: int | None = None) -> Iterator[int]:
    """Yield the batches to try, falling: what each rank has, and powers of two below it, in even calls.

    Of as many calls, the smallest batch that makes them: 17 and 16 of 33 prompts, not 32 and one.

    Args:
        num_prompts: of all ranks.
        num_ranks: that share them.
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


def fastest(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return what fits and takes the least time, or the first that fits where a time is not known."""
    fitting = [one for one in candidates if one.fits]
    if not fitting or any(one.seconds is None for one in fitting):
        return next(iter(fitting), None)
    return min(fitting, key=lambda one: one.seconds or 0)


def fits_at_all(question: Question) -> bool:
    """Return whether some layout fits with the smallest batch."""
    found = layouts(question.machine, question.workload, question.request, question.precision)
    return any(_Weigher(question, one).candidate(question.request.batch_size or 1).fits for one in found)


def is_close(candidate: Candidate, question: Question) -> bool:
    """Return whether an estimate's uncertainty reaches beyond the GPU or the host's memory."""
    device, gpu = candidate.device, question.gpu
    if device is not None and gpu is not None:
        is_beyond = device.peak_bytes * (1 + device.uncertainty) > gpu.usable_bytes
        return is_beyond or surely_bytes(candidate.host) > question.host_bytes
    return surely_bytes(candidate.host) > question.host_bytes


def excess(candidate: Candidate, question: Question) -> float:
    """Return how many times more a candidate needs than there is, of what it lacks most."""
    shares = [candidate.host.peak_bytes / max(1, question.host_bytes)]
    if candidate.device is not None:
        shares.append(candidate.device.peak_bytes / max(1, question.device_bytes))
    if candidate.strategy.uses_nvme and candidate.strategy.nvme_path is None:
        return math.inf
    return max(shares)


class _Weigher:
    """Estimates one layout with one batch after the other."""

    def __init__(self, question: Question, layout: Layout) -> None:
        strategy = layout.strategy
        if layout.topology.on_cpu and strategy.param_offload is OffloadDevice.CPU:
            strategy = replace(strategy, param_offload=OffloadDevice.NONE)  # it is host memory either way
        self._question, self._layout = question, layout
        self._host_of_gpus: MemoryEstimate | None = None
        self._weights = weights_of(
            question.model,
            strategy,
            layout.topology,
            versions=question.versions,
            gather=question.request.gather,
            gpu=question.gpu,
        )

    @property
    def weights_move(self) -> bool:
        """Whether weights come to the GPUs for each pass."""
        weights = self._weights
        return weights.is_in_parts and not weights.setup.topology.on_cpu and not weights.is_gathered_once

    def candidate(self, batch_size: int) -> Candidate:
        """Return the layout with this batch."""
        question = self._question
        device = None
        if question.gpu is not None:
            device = device_memory(self._weights, question.workload, batch_size=batch_size, gpu=question.gpu)
        host = self._host(batch_size)
        return Candidate(
            strategy=replace(self._layout.strategy, micro_batch_size=batch_size),
            topology=self._layout.topology,
            device=device,
            host=host,
            nvme_buffer_elements=swap_buffer_elements(self._weights),
            seconds=seconds_of(
                self._weights,
                question.workload,
                batch_size=batch_size,
                machine=question.machine,
                gpu=question.gpu,
            ),
            lacks="; ".join(self._lacks(device, host)),
        )

    def _host(self, batch_size: int) -> MemoryEstimate:
        """Return a node's host memory, which is the same for every batch where the ranks run on GPUs."""
        if self._host_of_gpus is not None:
            return self._host_of_gpus
        question = self._question
        found = host_memory(
            self._weights,
            question.workload,
            model=question.model,
            machine=question.machine,
            batch_size=batch_size,
        )
        if question.gpu is not None:
            self._host_of_gpus = found
        return found

    def _lacks(self, device: MemoryEstimate | None, host: MemoryEstimate) -> Iterator[str]:
        question = self._question
        if device is not None and device.peak_bytes > question.device_bytes:
            yield needs_words(device, question.device_bytes, "on each GPU")
        if host.peak_bytes > question.host_bytes:
            yield needs_words(host, question.host_bytes, "of host memory")
        strategy = self._layout.strategy
        if strategy.param_offload is OffloadDevice.NVME:
            if strategy.nvme_path is None:
                yield "needs --nvme-path, a folder on an NVMe disk"
            elif 0 < question.machine.nvme_bytes < (needed := nvme_bytes_needed(self._weights.setup)):
                there = format_bytes(question.machine.nvme_bytes)
                yield f"needs {format_bytes(needed)} of {there} on the NVMe disk"


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
