"""Problem: one model on one machine with what the user fixed; what the search of a plan starts from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from zerofit.core.estimates import Holder
from zerofit.core.strategy import Precision
from zerofit.core.units import format_bytes
from zerofit.planning.constraints import Constraints

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.core.capture import Capture
    from zerofit.core.estimates import MemoryEstimate, RunPhase
    from zerofit.core.facts import GpuSpec, Machine, ModelFacts, Versions, Workload
    from zerofit.core.plan import Topology
    from zerofit.core.request import Request
    from zerofit.planning.estimate.device_memory.optimizers import Stepper
    from zerofit.scripts.facts import ScriptFacts

DEFAULT_RESERVE = 0.05
"""ASSUMPTION: share of the GPU that stays free, for what a longer run adds and an estimate misses."""

LEAST_LENGTH = 128
"""ASSUMPTION: nobody wants samples cut below this, even under --allow length."""


class Allow(StrEnum):
    """A method that changes the training, and is considered only when the user allows it."""

    ADAFACTOR = "adafactor"
    """Adafactor in place of AdamW."""
    FREEZE = "freeze"
    """Embeddings that do not train."""
    LORA = "lora"
    """Low-rank adapters in place of the weights."""
    QLORA = "qlora"
    """Such adapters beside weights in 4 bits."""
    LENGTH = "length"
    """A shorter maximum length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Memory that a plan leaves free on each GPU."""

    share: float = 0.0
    """Of its memory."""
    num_bytes: int = 0
    """Beside the share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """Memory that a plan may take at most by its estimate, as a run was out of memory under another plan."""

    phases: tuple[tuple[RunPhase | None, int], ...] = ()
    """Phases with the bytes of their live tensors on each GPU; None for all phases."""
    host_bytes: int | None = None
    """Of one node; None for no limit but the node's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The properties of a captured script that a plan leaves as they are."""

    capture: Capture
    constraints: Constraints
    """Without those that the user's own flags overrule."""
    micro_batch_size: int | None
    """Samples of one forward pass of the script as it stands, on one rank; None where nothing shows it."""
    optimizer: Stepper
    """Properties of its optimizer."""
    optimizer_id: str | None
    """Id of its optimizer in compat/optimizer_table.py; None where there are several or none was seen."""
    optimizer_note: str
    """The assumption about it, in one sentence; empty for none."""
    weights: Precision
    """Format of most of its weights, as it makes them."""
    weight_bytes: int
    """Of an element of the narrowest of them; 0 where they are packed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The input of a search: model, machine, workload, constraints."""

    model: ModelFacts
    machine: Machine
    topology: Topology
    workload: Workload
    """With sequence_length filled in, for a model with tokens."""
    versions: Versions
    request: Request
    """Constraints of the user: each field of a Strategy that is set there is a constraint."""
    allow: frozenset[Allow] = frozenset()
    reserve: Reserve = field(default_factory=lambda: Reserve(share=DEFAULT_RESERVE))
    makes_model_first: bool = False
    """True if the script makes its model before anything that says "ZeRO stage 3"."""
    loads_weights: bool = True
    """True if weights come from a checkpoint; else each rank makes them in its own memory."""
    takes_fastest: bool = False
    """True if the fastest is to be taken, in another number format than the script's too."""
    expandable_segments: bool = False
    """True if the run has PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."""
    script: Script | None = None
    """The script that will run, where one was captured; None for a model that was named."""
    loaded_in: Precision = Precision.FP32
    """Format in which a model that was named is loaded."""
    source: ScriptFacts | None = None
    """What the source of the script shows, for the rules on what each rank runs; None if unknown."""
    why_shared: str = ""
    """Why ranks share samples, where the search chose so."""
    limits: MemoryLimits = MemoryLimits()
    """The memory that was not there in an earlier attempt of the run."""
    notes: tuple[str, ...] = ()
    """Assumptions about it, one sentence each."""

    @property
    def constraints(self) -> Constraints:
        """The settings that the script leaves open."""
        return self.script.constraints if self.script is not None else Constraints()

    @property
    def own_precision(self) -> Precision | None:
        """The format that a script computes in though it names none; None where any format may be taken."""
        if self.script is None or self.takes_fastest or self.script.capture.precision is not None:
            return None
        return None if "precision" in self.constraints.settled() else Precision.FP32

    @property
    def own_optimizer(self) -> Stepper:
        """The script's own optimizer; foreach AdamW where it is not known."""
        return self.script.optimizer if self.script is not None else None

    @property
    def other_weight_bytes(self) -> int:
        """Bytes of the script's other models on each GPU."""
        return self.script.capture.other_weight_bytes if self.script is not None else 0

    @property
    def passes_per_step(self) -> int:
        """Forward passes of the model in an optimizer step of a pipeline, which splits them itself."""
        if self.script is None or self.script.capture.trainer_accumulates(self.topology.data_parallel_size):
            return 1
        return self.script.capture.passes_per_step

    @property
    def rows_per_sample(self) -> int:
        """Rows of the model's batch to a sample."""
        return self.script.capture.rows_per_sample if self.script is not None else 1

    @property
    def weights(self) -> Precision:
        """Format of the weights as the script makes them."""
        return self.script.weights if self.script is not None else self.loaded_in

    @property
    def weight_bytes(self) -> int:
        """Bytes of an element of the narrowest of them."""
        if self.script is not None:
            return self.script.weight_bytes
        return 4 if self.loaded_in is Precision.FP32 else 2

    @property
    def card_bytes(self) -> int:
        """Memory of the smallest GPU of a node, without what the driver keeps."""
        return self.smallest_gpu.usable_bytes

    @property
    def smallest_gpu(self) -> GpuSpec:
        """The GPU that decides what fits."""
        return min(self.machine.gpus, key=lambda gpu: gpu.usable_bytes)

    @property
    def device_bytes(self) -> int:
        """Memory of that GPU that a plan may use."""
        return self.card_bytes - int(self.card_bytes * self.reserve.share) - self.reserve.num_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory of one node that a plan may take."""
        available = self.machine.host_memory_available_bytes
        return available if self.limits.host_bytes is None else min(available, self.limits.host_bytes)

    def beyond_limits(self, device: MemoryEstimate) -> str | None:
        """Return which limit an estimate of a GPU exceeds, in words; None where it keeps to all of them."""
        for phase, num_bytes in self.limits.phases:
            found = None if phase is None else device.of(phase)
            needed = device.most_tensors if found is None else found.held_by(Holder.TENSORS)
            if needed > num_bytes:
                where = "" if found is None else f" in phase {phase}"
                more = f"{format_bytes(needed - num_bytes)} more than allowed after running out of memory"
                return f"its tensors need {format_bytes(needed)}{where}, {more}"
        return None

    def is_close(self, device: MemoryEstimate, host: MemoryEstimate) -> bool:
        """Return True if the uncertainty of an estimate reaches beyond the GPU or the host's memory."""
        return self.is_close_on_gpu(device) or host.peak_bytes * (1 + host.uncertainty) > self.host_bytes

    def is_close_on_gpu(self, device: MemoryEstimate) -> bool:
        """Return True if the uncertainty of an estimate reaches beyond the GPU."""
        return device.peak_bytes * (1 + device.uncertainty) > self.card_bytes

    def shorter(self) -> Iterator[Problem]:
        """Yield the problem with samples of half the length, a quarter, and so on, down to LEAST_LENGTH."""
        length = self.workload.sequence_length if self.model.vocab_size else None
        while length is not None and length >= 2 * LEAST_LENGTH:
            length //= 2
            yield self.with_length(length)

    def with_length(self, sequence_length: int) -> Problem:
        """Return the problem with other samples."""
        target = self.workload.target_length
        workload = replace(
            self.workload,
            sequence_length=sequence_length,
            target_length=min(target, sequence_length) if target else None,
        )
        return replace(self, workload=workload)
