"""Estimates of a strategy's memory and time: terms per phase that sum, with an uncertainty."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RunPhase(StrEnum):
    """The phases of a run, each with its own memory."""

    LOAD = "load"
    """Weights are read and moved to the GPU."""
    INITIALISE = "initialise"
    """The engine makes its buffers."""
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"
    """Gradient clipping, the optimizer's step, and gathering the updated weights."""
    SAVE = "save"
    """A checkpoint is written."""
    EVALUATE = "evaluate"
    """A Trainer evaluates: forward passes without gradients, and what it keeps of their predictions."""
    PREFILL = "prefill"
    """A batch of prompts runs through the model and fills the KV cache."""
    DECODE = "decode"
    """The last token of a batch is generated: the KV cache is largest."""


class Holder(StrEnum):
    """What the bytes of a term belong to."""

    TENSORS = "tensors"
    """Live tensors on the GPU: what torch.cuda.memory_allocated counts."""
    CACHE = "cache"
    """Reserved by PyTorch's allocator but not allocated: rounding, fragmentation and cached blocks."""
    OUTSIDE = "outside"
    """On the GPU, outside PyTorch: CUDA context, libraries, NCCL."""
    PINNED = "pinned"
    """Page-locked host memory."""
    PAGEABLE = "pageable"
    """Other host memory."""
    MAPPED = "mapped"
    """Pages of files, which the kernel takes back under memory pressure: no run needs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One named part of a sum of bytes."""

    name: str
    """Its name, such as "activations"."""
    num_bytes: int
    holder: Holder
    formula: str
    """How the number was computed, with its symbols: "2 P / N"."""
    source: str
    """Source of the formula: a file and line of a library's version, a link, or "traced"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMemory:
    """Memory at the peak of one phase."""

    phase: RunPhase
    terms: tuple[Term, ...]
    """Terms that are live at the same time, so they sum; pages of files are named and don't count."""

    def held_by(self, *holders: Holder) -> int:
        """Return the bytes of these holders' terms."""
        return sum(term.num_bytes for term in self.terms if term.holder in holders)

    @property
    def total_bytes(self) -> int:
        """Sum of all terms that the phase needs."""
        return sum(term.num_bytes for term in self.terms if term.holder is not Holder.MAPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Memory of one GPU, or of one node's host, over a run."""

    phases: tuple[PhaseMemory, ...]
    """In order of time; phases that don't occur are left out."""
    uncertainty: float
    """Relative: the measured peak is expected within (1 +- uncertainty) of the estimate."""
    uncertainty_source: str
    """Where the uncertainty comes from."""

    @property
    def peak(self) -> PhaseMemory:
        """The phase that needs most; among equals, the one with the most live tensors."""
        return max(self.phases, key=lambda phase: (phase.total_bytes, phase.held_by(Holder.TENSORS)))

    @property
    def peak_bytes(self) -> int:
        """The maximum over all phases."""
        return self.peak.total_bytes

    @property
    def lower_bytes(self) -> float:
        """The peak at the lower end of its uncertainty."""
        return self.peak_bytes * (1 - self.uncertainty)

    @property
    def upper_bytes(self) -> float:
        """The peak at the upper end of its uncertainty."""
        return self.peak_bytes * (1 + self.uncertainty)

    @property
    def most_tensors(self) -> int:
        """Maximum of live tensor bytes over all phases."""
        return max(phase.held_by(Holder.TENSORS) for phase in self.phases)

    def of(self, phase: RunPhase) -> PhaseMemory | None:
        """Return one phase, or None if it doesn't occur."""
        return next((memory for memory in self.phases if memory.phase is phase), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeTerm:
    """One named part of an optimizer step's time."""

    name: str
    """What takes the time, such as "matrix products"."""
    seconds: float
    """Time added to the step: of two overlapping operations, the longer one counts in full."""
    formula: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Time of one optimizer step with all its micro-batches."""

    terms: tuple[TimeTerm, ...]
    uncertainty: float
    """Relative, as in MemoryEstimate."""
    uncertainty_source: str

    @property
    def seconds(self) -> float:
        """Sum of all terms."""
        return sum(term.seconds for term in self.terms)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationEstimate:
    """The memory of a Trainer's evaluations during training."""

    device: MemoryEstimate
    """GPU memory of the rank that needs most, in its only phase; if it does not fit, without the allocator's
    cache."""
    fits: bool
    batch_size: int
    """Samples per rank in one batch."""
    host_bytes: int
    """Predictions and labels that one node's ranks move to host memory; each rank holds those of all."""
    change: tuple[tuple[str, str], ...] = ()
    """TrainingArguments with which it fits, and their values; empty if it fits, or none was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The memory and time of one strategy."""

    device: MemoryEstimate
    """GPU memory of the rank that needs most."""
    host: MemoryEstimate
    """Memory of one node's host, for all its ranks."""
    step_time: StepTime | None
    """None if the machine's rates are unknown."""
    tokens_per_step: int
    """Over all ranks; 0 for models without tokens."""
    num_trained: int = 0
    """Elements of the trained parameters; 0 if not counted."""
    evaluation: EvaluationEstimate | None = None
    """None without evaluations, and for strategies that are only compared."""

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens trained per second over all ranks."""
        return self.tokens_per_step / self.step_time.seconds if self.step_time else None
