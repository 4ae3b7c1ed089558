"""Problem: a training run to plan: model, machine, workload and the user's constraints."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from zerofit.checking.constraints import Constraints
from zerofit.core.estimates import Holder
from zerofit.core.strategy import Precision
from zerofit.core.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.core.capture import Capture
    from zerofit.core.estimates import Estimate, MemoryEstimate, RunPhase
    from zerofit.core.facts import GpuSpec, Machine, ModelFacts, Versions, Workload
    from zerofit.core.plan import Topology
    from zerofit.core.request import Request
    from zerofit.planning.estimate.device_memory.optimizers import Stepper
    from zerofit.scripts.facts import ScriptFacts

DEFAULT_RESERVE = 0.05
"""ASSUMPTION: share of GPU memory kept free for what a longer run adds and the estimate misses."""

LEAST_LENGTH = 128
"""ASSUMPTION: nobody wants samples cut below this, even under --allow length."""


class Allow(StrEnum):
    """A change to the training that is considered only if the user allows it."""

    ADAFACTOR = "adafactor"
    """Adafactor in place of AdamW."""
    FREEZE = "freeze"
    """Frozen embeddings."""
    LORA = "lora"
    """Low-rank adapters in place of the weights."""
    QLORA = "qlora"
    """LoRA on a base in 4 bits."""
    LENGTH = "length"
    """A shorter maximum length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Memory that a plan leaves free on each GPU: a share of it plus a number of bytes."""

    share: float = 0.0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """Upper limits of a plan's estimate, set after a run under another plan was out of memory."""

    phases: tuple[tuple[RunPhase | None, int], ...] = ()
    """Limits of the live tensors on each GPU by phase, in bytes; None for all phases."""
    host_bytes: int | None = None
    """Limit of one node's host memory; None for the node's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A captured script, with the facts that planning needs."""

    capture: Capture
    constraints: Constraints
    """Without those that the user's flags override."""
    micro_batch_size: int | None
    """Samples per rank in one forward pass of the unchanged script; None if unknown."""
    optimizer: Stepper
    """The kind of its optimizer."""
    optimizer_id: str | None
    """Id of its optimizer in zerofit/checking/rules/optimizer/table.py; None if there are several or none."""
    optimizer_note: str
    """The assumption about its optimizer, in one sentence; empty for none."""
    weights: Precision
    """Format in which the script creates most of its weights."""
    weight_bytes: int
    """Bytes per element of the narrowest weights; 0 if they are packed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The input of a plan: model, machine, workload and constraints."""

    model: ModelFacts
    machine: Machine
    topology: Topology
    workload: Workload
    """With sequence_length set, for a model with tokens."""
    versions: Versions
    request: Request
    """Each Strategy field that the user set here is a constraint."""
    allow: frozenset[Allow] = frozenset()
    reserve: Reserve = field(default_factory=lambda: Reserve(share=DEFAULT_RESERVE))
    makes_model_first: bool = False
    """True if the script creates its model outside zero.Init (makes_model_first of subject.py)."""
    loads_weights: bool = True
    """True if weights come from a checkpoint; else each rank initializes them in its own memory."""
    takes_fastest: bool = False
    """True to take the fastest strategy, even in another precision than the script's."""
    expandable_segments: bool = False
    """True if the run has PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."""
    script: Script | None = None
    """The captured script; None for a model given by --model."""
    loaded_in: Precision = Precision.FP32
    """Format in which a model given by --model is loaded."""
    source: ScriptFacts | None = None
    """Facts from the script's source, for the rules on what each rank runs; None if unknown."""
    why_shared: str = ""
    """Why ranks share samples; empty unless the planner chose it."""
    limits: MemoryLimits = MemoryLimits()
    """Limits learned from an earlier attempt that was out of memory."""
    notes: tuple[str, ...] = ()
    """Assumptions, one sentence each."""

    @property
    def constraints(self) -> Constraints:
        """The script's constraints; none without a script."""
        return self.script.constraints if self.script is not None else Constraints()

    @property
    def own_precision(self) -> Precision | None:
        """fp32 for a script that names no precision; None if any precision may be chosen."""
        if self.script is None or self.takes_fastest or self.script.capture.precision is not None:
            return None
        return None if "precision" in self.constraints.settled() else Precision.FP32

    @property
    def own_optimizer(self) -> Stepper:
        """The script's own optimizer; foreach AdamW if unknown."""
        return self.script.optimizer if self.script is not None else None

    @property
    def other_weight_bytes(self) -> int:
        """Bytes of the script's other models, such as a reference model, on each GPU."""
        return self.script.capture.other_weight_bytes if self.script is not None else 0

    @property
    def passes_per_step(self) -> int:
        """Forward passes per optimizer step that a pipeline splits into micro-batches."""
        if self.script is None or self.script.capture.trainer_accumulates(self.topology.data_parallel_size):
            return 1
        return self.script.capture.passes_per_step

    @property
    def rows_per_sample(self) -> int:
        """Rows of the model's batch per sample."""
        return self.script.capture.rows_per_sample if self.script is not None else 1

    @property
    def weights(self) -> Precision:
        """Format in which the weights are created or loaded."""
        return self.script.weights if self.script is not None else self.loaded_in

    @property
    def weight_bytes(self) -> int:
        """Bytes per element of the narrowest weights."""
        if self.script is not None:
            return self.script.weight_bytes
        return 4 if self.loaded_in is Precision.FP32 else 2

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
        return self.card_bytes - int(self.card_bytes * self.reserve.share) - self.reserve.num_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory of one node that a plan may use."""
        available = self.machine.host_memory_available_bytes
        return available if self.limits.host_bytes is None else min(available, self.limits.host_bytes)

    def beyond_limits(self, device: MemoryEstimate) -> str | None:
        """Return how an estimate exceeds the limits of an earlier attempt, as text; None if it doesn't."""
        for phase, num_bytes in self.limits.phases:
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
        return device.upper_bytes > self.card_bytes

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
