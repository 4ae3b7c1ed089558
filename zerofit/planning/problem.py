"""Problem: a training run to plan: model, machine, workload and the user's constraints."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from zerofit.checking.constraints import Constraints, of_packed_checkpoint, without_checkpointing
from zerofit.core.estimates import Holder
from zerofit.core.strategy import Precision
from zerofit.core.units import format_bytes
from zerofit.planning.estimate.device_memory.ragged import upper_need

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.core.capture import Capture
    from zerofit.core.estimates import Estimate, MemoryEstimate
    from zerofit.core.facts import GpuSpec, Machine, ModelFacts, Versions, Workload
    from zerofit.core.overrides import Overrides
    from zerofit.core.plan import Topology
    from zerofit.planning.estimate.model_use import ModelUse
    from zerofit.planning.options import Allow
    from zerofit.planning.run_spec import RunSpec
    from zerofit.planning.subject import Subject

LEAST_LENGTH = 128
"""ASSUMPTION: nobody wants samples cut below this, even under --allow length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A captured script, with the facts that planning needs."""

    capture: Capture
    constraints: Constraints
    """Without those that the user's flags override."""
    micro_batch_size: int | None
    """Samples per rank in one forward pass of the unchanged script; None if unknown."""
    optimizer_id: str | None
    """Id of its optimizer in zerofit/core/optimizers/table.py; None if there are several or none."""
    optimizer_note: str
    """The assumption about its optimizer, in one sentence; empty for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The input of a plan: what was asked for, what is trained, and the ranks of a machine."""

    spec: RunSpec
    """What the user asked for, as far as it applies to the subject."""
    subject: Subject
    """The model or the captured script."""
    machine: Machine
    topology: Topology
    versions: Versions
    workload: Workload
    """Batch and lengths on these ranks; with sequence_length set, for a model with tokens."""
    script: Script | None = None
    """The captured script on these ranks; None for a model given by --model."""
    why_shared: str = ""
    """Why ranks share samples; empty unless the planner chose it."""
    notes: tuple[str, ...] = ()
    """Assumptions, one sentence each."""

    @property
    def model(self) -> ModelFacts:
        """The model's dimensions."""
        return self.subject.facts

    @property
    def use(self) -> ModelUse:
        """How the script makes and feeds the model."""
        return self.subject.use

    @property
    def said(self) -> Overrides:
        """What the user set; a plan must follow it."""
        return self.spec.overrides

    @property
    def allow(self) -> frozenset[Allow]:
        """Changes to the training that the user permits."""
        return self.spec.options.allow

    @property
    def prefers_speed(self) -> bool:
        """True to take the fastest strategy, even in another precision than the script's."""
        return self.spec.options.prefers_speed

    def with_options(self, **options: Any) -> Problem:
        """Return the problem with other options of planning, by field of ModelFlags."""
        return replace(self, spec=replace(self.spec, options=replace(self.spec.options, **options)))

    @property
    def constraints(self) -> Constraints:
        """The script's constraints; of a named model those of its class and of a quantized checkpoint."""
        if self.script is not None:
            return self.script.constraints
        packed = of_packed_checkpoint() if self.use.is_packed else ()
        lacking = () if self.use.can_checkpoint else (without_checkpointing(self.model.architecture),)
        return Constraints(pins=(*packed, *lacking))

    @property
    def own_precision(self) -> Precision | None:
        """fp32 for a script that names no precision; None if any precision may be chosen."""
        if self.script is None or self.prefers_speed or self.script.capture.precision is not None:
            return None
        return None if "precision" in self.constraints.settled() else Precision.FP32

    @property
    def passes_per_step(self) -> int:
        """Forward passes per optimizer step that a pipeline splits into micro-batches."""
        if self.script is None or self.script.capture.trainer_accumulates(self.topology.data_parallel_size):
            return 1
        return self.script.capture.passes_per_step

    @property
    def card_bytes(self) -> int:
        """Memory of the smallest GPU, without what the driver keeps."""
        return self.smallest_gpu.usable_bytes

    @property
    def smallest_gpu(self) -> GpuSpec:
        """The node's GPU with the least memory, which decides what fits."""
        return min(self.machine.gpus, key=lambda gpu: gpu.usable_bytes)

    @property
    def device_bytes(self) -> int:
        """GPU memory that a plan may use: that of the smallest GPU, less the reserve."""
        reserve = self.spec.options.reserve
        return self.card_bytes - int(self.card_bytes * reserve.share) - reserve.num_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory of one node that a plan may use."""
        available, limit = self.machine.host_memory_available_bytes, self.spec.limits.host_bytes
        return available if limit is None else min(available, limit)

    def beyond_limits(self, device: MemoryEstimate) -> str | None:
        """Return how an estimate exceeds the limits of an earlier attempt, as text; None if it doesn't."""
        for phase, num_bytes in self.spec.limits.phases:
            found = None if phase is None else device.of(phase)
            needed = device.most_tensors if found is None else found.held_by(Holder.TENSORS)
            if needed > num_bytes:
                where = "" if found is None else f" in phase {phase}"
                more = f"{format_bytes(needed - num_bytes)} more than allowed after running out of memory"
                return f"its tensors need {format_bytes(needed)}{where}, {more}"
        return None

    def is_close(self, estimate: Estimate) -> bool:
        """Return True if an estimate exceeds GPU or host memory at the upper end of its uncertainty."""
        return self.is_close_on_gpu(estimate.device) or estimate.host.upper_bytes > self.host_bytes

    def is_close_on_gpu(self, device: MemoryEstimate) -> bool:
        """Return True if an estimate exceeds the GPU's memory at the upper end of its uncertainty."""
        return upper_need(device) > self.card_bytes

    def shorter(self) -> Iterator[Problem]:
        """Yield the problem with samples of half the length, a quarter, and so on, down to LEAST_LENGTH."""
        length, target = self.workload.sequence_length, self.workload.target_length
        while self.model.vocab_size and length is not None and length >= 2 * LEAST_LENGTH:
            length //= 2
            workload = replace(
                self.workload,
                sequence_length=length,
                target_length=min(target, length) if target else None,
            )
            yield replace(self, workload=workload)
