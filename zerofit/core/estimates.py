"""Estimates: memory and time of a strategy as terms that sum, one set a phase, with what is not certain."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RunPhase(StrEnum):
    """The parts of a run that need different memory."""

    LOAD = "load"
    """Weights are read and moved to the GPU."""
    INITIALISE = "initialise"
    """The engine makes its buffers."""
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"
    """Clipping, the optimizer's step, and gathering what it changed."""
    SAVE = "save"
    """A checkpoint is written."""
    PREFILL = "prefill"
    """A batch of prompts goes through the model, which fills the cache of keys and values."""
    DECODE = "decode"
    """The last token of a batch is generated: the cache is at its largest."""


class Holder(StrEnum):
    """Who holds the bytes of a term."""

    TENSORS = "tensors"
    """Live tensors on the GPU: what torch.cuda.memory_allocated counts."""
    CACHE = "cache"
    """PyTorch's allocator: reserved and not allocated; rounding, holes and cached blocks."""
    OUTSIDE = "outside"
    """On the GPU, not PyTorch's: CUDA context, libraries, NCCL."""
    PINNED = "pinned"
    """Page-locked host memory."""
    PAGEABLE = "pageable"
    """Other host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One named part of a sum of bytes."""

    name: str
    """Its name, such as "activations"."""
    num_bytes: int
    holder: Holder
    formula: str
    """How the number came about, with its symbols: "2 P / N"."""
    source: str
    """Where the formula is from: a file and line of a library's version, a link, or "traced"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMemory:
    """Memory at the largest moment of one phase."""

    phase: RunPhase
    terms: tuple[Term, ...]
    """They are alive together, so they sum."""

    def held_by(self, *holders: Holder) -> int:
        """Return the bytes that these holders hold."""
        return sum(term.num_bytes for term in self.terms if term.holder in holders)

    @property
    def total_bytes(self) -> int:
        """All terms together."""
        return sum(term.num_bytes for term in self.terms)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Memory of one GPU, or of one node's host, over a run."""

    phases: tuple[PhaseMemory, ...]
    """In the order in which they come; a phase that does not occur is left out."""
    uncertainty: float
    """Relative: the measured peak is expected within (1 +- uncertainty) of the estimate."""
    uncertainty_source: str
    """The source of the uncertainty."""

    @property
    def peak(self) -> PhaseMemory:
        """The phase that needs most; of those that need as much, the one with the most live tensors."""
        return max(self.phases, key=lambda phase: (phase.total_bytes, phase.held_by(Holder.TENSORS)))

    @property
    def peak_bytes(self) -> int:
        """The most that any phase needs."""
        return self.peak.total_bytes

    @property
    def most_tensors(self) -> int:
        """Most bytes of live tensors in any phase."""
        return max(phase.held_by(Holder.TENSORS) for phase in self.phases)

    def of(self, phase: RunPhase) -> PhaseMemory | None:
        """Return one phase, or None where it does not occur."""
        return next((one for one in self.phases if one.phase is phase), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeTerm:
    """One named part of an optimizer step's time."""

    name: str
    """The operation that takes the time, such as "matrix products"."""
    seconds: float
    """The time it adds: where two operations overlap, the longer one has all of it."""
    formula: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Time of one optimizer step, all micro-batches in it."""

    terms: tuple[TimeTerm, ...]
    uncertainty: float
    """Relative, as in MemoryEstimate."""
    uncertainty_source: str

    @property
    def seconds(self) -> float:
        """All terms together."""
        return sum(term.seconds for term in self.terms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The memory and time of one strategy."""

    device: MemoryEstimate
    """Of the rank that needs most."""
    host: MemoryEstimate
    """Of one node, all its ranks together."""
    step_time: StepTime | None
    """None where the machine's rates are not known."""
    tokens_per_step: int
    """Over all ranks; 0 for a model without tokens."""
    num_trained: int = 0
    """Elements of the parameters that train; 0 where they are not counted."""

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens trained a second over all ranks."""
        return self.tokens_per_step / self.step_time.seconds if self.step_time else None
