"""best_candidates: of each layout the largest batch that fits, or what its smallest one lacks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zerofit.estimate.host import nvme_bytes_needed
from zerofit.inference.device import device_memory, weights_of
from zerofit.inference.host import host_memory, surely_bytes, swap_buffer_elements
from zerofit.inference.layouts import layouts
from zerofit.inference.planned import Candidate
from zerofit.inference.seconds import seconds_of
from zerofit.inference.words import needs_words
from zerofit.planning.problem import DEFAULT_RESERVE
from zerofit.strategy import OffloadDevice
from zerofit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zerofit.estimates import MemoryEstimate
    from zerofit.facts import GpuSpec, Machine, ModelFacts, Versions
    from zerofit.inference.asked import InferenceRequest, InferenceWorkload
    from zerofit.inference.layouts import Layout
    from zerofit.strategy import Precision

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
