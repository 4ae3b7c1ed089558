"""InferencePlan: the layout that generates, its batch, its memory, and why the others lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.estimates import Estimate
from zerofit.facts import Workload
from zerofit.inference.asked import DTYPES
from zerofit.plan import Plan, Rejected
from zerofit.strategy import Precision

if TYPE_CHECKING:
    from zerofit.estimates import MemoryEstimate
    from zerofit.facts import Machine, ModelFacts, Versions
    from zerofit.inference.asked import InferenceRequest, InferenceWorkload
    from zerofit.plan import Reason, Topology
    from zerofit.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One layout with one batch, and what it needs."""

    strategy: Strategy
    """Its micro_batch_size is the number of prompts in one call."""
    topology: Topology
    device: MemoryEstimate | None
    """Of the GPU that needs most; None where the ranks run on the CPU."""
    host: MemoryEstimate
    """Of one node, all its ranks together."""
    nvme_buffer_elements: int
    """Elements of a buffer between NVMe and GPU: DeepSpeed's offload_param.buffer_size must not be less."""
    seconds: float | None
    """About how long all prompts take, as zerofit.inference.seconds computes it; None where it can't."""
    lacks: str
    """What there is too little of, in a phrase; empty where it fits."""

    @property
    def fits(self) -> bool:
        """Whether GPUs, hosts and disks have what it needs."""
        return not self.lacks

    @property
    def batch_size(self) -> int:
        """Prompts in one call on one rank."""
        return self.strategy.micro_batch_size or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class InferencePlan:
    """What will generate, where, and why."""

    model: ModelFacts
    machine: Machine
    versions: Versions
    workload: InferenceWorkload
    request: InferenceRequest
    chosen: Candidate
    """The nearest one where nothing fits."""
    is_close: bool
    """Whether the chosen layout fits only if its estimates are not too low."""
    others: tuple[tuple[Candidate, str], ...]
    """Every other layout with its smallest batch, and one phrase on why it lost."""
    device_bytes: int
    """What may be taken of each GPU; 0 where the ranks run on the CPU."""
    host_bytes: int
    """What may be taken of each node's host memory."""
    reasons: tuple[Reason, ...]
    """Why each field of the strategy and the topology has its value."""
    suggestions: tuple[str, ...] = ()
    """The smallest changes of each sort that would make something fit, where nothing does."""

    @property
    def fits(self) -> bool:
        """Whether the chosen layout fits."""
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
        """Return what the launcher starts: the same strategy and ranks, without training."""
        chosen = self.chosen
        longest = self.workload.longest_prompt + self.workload.max_new_tokens
        estimate = None
        if chosen.device is not None:
            estimate = Estimate(device=chosen.device, host=chosen.host, step_time=None, tokens_per_step=0)
        return Plan(
            strategy=chosen.strategy,
            topology=chosen.topology,
            machine=self.machine,
            versions=self.versions,
            workload=Workload(sequence_length=longest),
            model=self.model,
            trains=False,
            reasons=self.reasons,
            rejected=tuple(Rejected(strategy=other.strategy, why=why) for other, why in self.others),
            estimate=estimate,
        )
