"""A trial: the task of its process, its measurements, and their prediction."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from enum import StrEnum

from zerofit.core.strategy import Precision, Strategy
from zerofit.core.validation import parse_strictly


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSpec:
    """One training run in a separate process."""

    model: str
    """A catalog name, a folder, or a config.json."""
    task: str
    """The task of its head: a value of zerofit.models.task.Task."""
    strategy: Strategy
    """With micro-batch and accumulation filled in."""
    sequence_length: int
    """Tokens per sample."""
    full_length: int
    """Tokens of the samples before they are truncated to sequence_length."""
    num_steps: int
    """Timed optimizer steps after the warm-up."""
    on_cpu: bool
    weights: Precision = Precision.FP32
    """Format in which the loop creates the model. fp32 weights compute in 16 bit by autocast, 16-bit weights
    without it; DeepSpeed casts itself."""
    num_ranks: int = 1
    """Data-parallel ranks under DeepSpeed or FSDP2. Above 1 the process is rank 0 of them, with collectives
    that exchange nothing: its tensors are those of a rank, its losses are meaningless."""
    memory_limit_bytes: int | None = None
    """Limit of torch's allocations on the GPU; on the CPU, of memory mapped after the imports: private
    writable mappings (getrlimit(2), RLIMIT_DATA). None for no limit."""
    waits: bool = False
    """True if the process waits for a line on stdin after its imports, before it touches the device."""

    @property
    def batch_size(self) -> int:
        """Samples per optimizer step."""
        return (self.strategy.micro_batch_size or 1) * (self.strategy.gradient_accumulation_steps or 1)


def spec_to_json(spec: TrialSpec) -> str:
    """Return the text of a spec file."""
    return json.dumps(dataclasses.asdict(spec), indent=2) + "\n"


def spec_from_json(text: str) -> TrialSpec:
    """Return the spec in a text of spec_to_json()."""
    return parse_strictly(TrialSpec, text)


class TrialState(StrEnum):
    """How a trial ended."""

    DONE = "done"
    OUT_OF_MEMORY = "out of memory"
    """The allocator raised an out-of-memory error."""
    KILLED = "killed"
    """A signal ended the process."""
    TOO_SLOW = "over the time limit"
    CANNOT_RUN = "can't run here"
    """A requirement is missing."""
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBytes:
    """Bytes of tensors by purpose."""

    weights: int
    """Parameters and buffers."""
    gradients: int
    """Of all parameters, before a step."""
    optimizer_states: int
    activations: int | None
    """Alive at the end of a micro-batch's forward pass, without the batch itself; None if not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialMeasurement:
    """The measurements of one trial."""

    process_bytes: int
    """Peak resident memory above the level after imports."""
    process_peak_bytes: int
    """The same peak as reported by the kernel (VmHWM)."""
    allocated_bytes: int | None = None
    """Peak of torch's tensors on the GPU; None on the CPU."""
    reserved_bytes: int | None = None
    """Peak reserved by torch's allocator."""
    device_bytes: int | None = None
    """Peak GPU memory of the process: reserved_bytes, plus the driver's count outside torch after the last
    step, from device_process_bytes if known, else device_used_bytes."""
    device_process_bytes: int | None = None
    """NVML's count for this process after the last step; None if unknown, as in a container."""
    device_used_bytes: int | None = None
    """Increase of all processes' GPU memory from before CUDA's start to after the last step."""
    context_bytes: int | None = None
    """The driver's count for the process after CUDA's start, before its first tensor."""
    step_times_s: tuple[float, ...]
    """Of each timed optimizer step."""
    step_time_s: float
    """Their median."""
    tokens_per_s: float
    losses: tuple[float, ...]
    """Before each warm-up step, which run without dropout, so that trials can be compared."""
    counted: TensorBytes | None
    """None under DeepSpeed, whose partitions and buffers are not tensors of the model."""
    num_trained_parameters: int
    num_threads: int
    """torch's CPU threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """How one trial ended."""

    state: TrialState
    reason: str = ""
    """Why it is not done, in one line."""
    measured: TrialMeasurement | None = None
    """Its measurements; None unless it is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPrediction:
    """The estimator's prediction of one trial."""

    parts: TensorBytes | None
    """None under DeepSpeed, where tensors are not counted."""
    allocated_bytes: int | None = None
    """Peak of the tensors on the GPU; None without a GPU to predict for."""
    reserved_bytes: int | None = None
    """Peak reserved by torch's allocator."""
    device_bytes: int | None = None
    """Including the CUDA context; without NCCL, since many ranks are measured as one with fake
    collectives."""
    step_time_s: float | None = None
    """None if the GPU's rates are unknown, and for many ranks, which exchange nothing."""


def peak_of(measured: TrialMeasurement) -> int:
    """Return the peak for comparing trials: torch's on a GPU, else the process's."""
    return measured.process_bytes if measured.allocated_bytes is None else measured.allocated_bytes
