"""InferenceProblem, and InferencePlan: the layout that generates, its batch, and why the others lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.core.estimates import Estimate
from zerofit.core.facts import Workload
from zerofit.core.plan import Plan, Rejected, Topology
from zerofit.core.strategy import DTYPES, OffloadDevice, Precision, ZeroStage
from zerofit.planning.inference.memory import surely_bytes
from zerofit.planning.problem import DEFAULT_RESERVE
from zerofit.planning.search import Candidate

if TYPE_CHECKING:
    from zerofit.core.estimates import MemoryEstimate
    from zerofit.core.facts import GpuSpec, Machine, ModelFacts, Versions
    from zerofit.core.plan import Reason
    from zerofit.core.strategy import Strategy
    from zerofit.planning.inference.request import InferenceRequest, InferenceWorkload


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceCandidate(Candidate):
    """One layout with one batch, which is its micro_batch_size, and what it needs."""

    topology: Topology
    device: MemoryEstimate | None
    """Of the GPU that needs most; None where the ranks run on the CPU."""
    host: MemoryEstimate
    """Of one node, all its ranks together."""
    nvme_buffer_elements: int
    """Elements of a buffer between NVMe and GPU: DeepSpeed's offload_param.buffer_size must not be less."""
    seconds: float | None
    """About how long all prompts take (see seconds_of in estimator.py); None where it can't be computed."""

    @property
    def batch_size(self) -> int:
        """Prompts in one call on one rank."""
        return self.strategy.micro_batch_size or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceProblem:
    """A model, a machine and prompts."""

    model: ModelFacts
    machine: Machine
    versions: Versions
    workload: InferenceWorkload
    request: InferenceRequest
    precision: Precision
    """Of the weights: the request's, or the one that was chosen."""

    @property
    def on_cpu(self) -> bool:
        """True if the ranks run on the CPU."""
        return self.request.on_cpu or not self.machine.gpus

    @property
    def gpu(self) -> GpuSpec | None:
        """The GPU that decides what fits; None where the ranks run on the CPU."""
        return None if self.on_cpu else min(self.machine.gpus, key=lambda gpu: gpu.usable_bytes)

    @property
    def device_bytes(self) -> int:
        """Memory of that GPU that may be taken."""
        return int(self.gpu.usable_bytes * (1 - DEFAULT_RESERVE)) if self.gpu else 0

    @property
    def host_bytes(self) -> int:
        """Host memory of a node that may be taken."""
        return self.machine.host_memory_available_bytes

    def is_close(self, candidate: InferenceCandidate) -> bool:
        """Return True if an estimate's uncertainty reaches beyond the GPU or the host's memory."""
        device, gpu = candidate.device, self.gpu
        if device is not None and gpu is not None:
            is_beyond = device.peak_bytes * (1 + device.uncertainty) > gpu.usable_bytes
            return is_beyond or surely_bytes(candidate.host) > self.host_bytes
        return surely_bytes(candidate.host) > self.host_bytes

    def topology(self, stage: ZeroStage) -> Topology:
        """Return the ranks: those said, else all GPUs; of whole models no more than there are prompts."""
        num_nodes = self.request.num_nodes or 1
        per_node = 1 if self.on_cpu else len(self.machine.gpus)
        if stage is not ZeroStage.PARAMETERS:
            per_node = max(1, min(per_node, -(-self.workload.num_prompts // num_nodes)))
        world_size = self.request.num_processes or num_nodes * per_node
        return Topology(num_nodes=num_nodes, world_size=world_size, on_cpu=self.on_cpu)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferencePlan:
    """The layout that will generate, and why."""

    problem: InferenceProblem
    chosen: InferenceCandidate
    """The nearest one where nothing fits."""
    is_close: bool
    """True if the chosen layout fits only if its estimates are not too low."""
    others: tuple[tuple[InferenceCandidate, str], ...]
    """Every other layout with its smallest batch, and one phrase on why it lost."""
    reasons: tuple[Reason, ...]
    """Why each field of the strategy and the topology has its value."""
    suggestions: tuple[str, ...] = ()
    """The smallest changes of each sort that would make something fit, where nothing does."""

    @property
    def fits(self) -> bool:
        """True if the chosen layout fits."""
        return self.chosen.fits

    @property
    def strategy(self) -> Strategy:
        """The chosen layout."""
        return self.chosen.strategy

    @property
    def topology(self) -> Topology:
        """The ranks of the chosen layout."""
        return self.chosen.topology

    @property
    def batch_size(self) -> int:
        """Prompts in one call on one rank."""
        return self.chosen.batch_size

    @property
    def dtype(self) -> str:
        """Format of the weights, as torch names it, such as "bfloat16"."""
        precision = self.strategy.precision or Precision.FP32
        return next(name for name, one in DTYPES.items() if one is precision)

    def as_plan(self) -> Plan:
        """Return the plan that the launcher starts: the same strategy and ranks, without training."""
        chosen, problem = self.chosen, self.problem
        longest = problem.workload.longest_prompt + problem.workload.max_new_tokens
        estimate = None
        if chosen.device is not None:
            estimate = Estimate(device=chosen.device, host=chosen.host, step_time=None, tokens_per_step=0)
        return Plan(
            strategy=chosen.strategy,
            topology=chosen.topology,
            machine=problem.machine,
            versions=problem.versions,
            workload=Workload(sequence_length=longest),
            model=problem.model,
            trains=False,
            reasons=self.reasons,
            rejected=tuple(Rejected(strategy=other.strategy, why=why) for other, why in self.others),
            estimate=estimate,
        )


TIME_WORDS = "to read and move weights, at the peaks of memory and links: computed, not measured"
"""The meaning of a plan's time."""
_OFFLOADED = {OffloadDevice.CPU: ", weights in host memory", OffloadDevice.NVME: ", weights on NVMe"}


def layout_words(strategy: Strategy, topology: Topology) -> str:
    """Return where the model lies: "whole model on each of 8 GPUs", "ZeRO-3 over 8 GPUs"."""
    if strategy.zero_stage is ZeroStage.PARAMETERS:
        offloaded = _OFFLOADED.get(strategy.param_offload, "")
        return f"ZeRO-3 {'over' if topology.world_size > 1 else 'on'} {ranks_words(topology)}{offloaded}"
    if topology.world_size == 1:
        return f"whole model on {ranks_words(topology)}"
    return f"whole model on each of {ranks_words(topology)}"


def ranks_words(topology: Topology) -> str:
    """Return the ranks: "8 GPUs", "16 GPUs of 2 nodes", "one GPU", "the CPU", "2 ranks on the CPU"."""
    if topology.on_cpu:
        words = "the CPU" if topology.world_size == 1 else f"{topology.world_size} ranks on the CPU"
    else:
        words = "one GPU" if topology.world_size == 1 else f"{topology.world_size} GPUs"
    return f"{words} of {topology.num_nodes} nodes" if topology.num_nodes > 1 else words


def duration(seconds: float) -> str:
    """Return a time as a person would say it: "40 s", "12 min", "3.1 h"."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
