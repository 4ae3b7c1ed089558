"""A trial: what its process is told, and what it measured, beside what was predicted."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from enum import StrEnum

from zerofit.core.strategy import Precision, Strategy
from zerofit.core.validation import parse_strictly


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSpec:
    """One training run in a process of its own."""

    model: str
    """A name of the catalog, a folder, or a config.json."""
    task: str
    """The task of its head: a value of zerofit.models.task.Task."""
    strategy: Strategy
    """With micro-batch and accumulation filled in."""
    sequence_length: int
    """Tokens of a sample."""
    full_length: int
    """Tokens of the samples as they are made, before they are cut to sequence_length."""
    num_steps: int
    """Optimizer steps that are timed, after the warm-up."""
    on_cpu: bool
    weights: Precision = Precision.FP32
    """Format in which the loop makes the model. On fp32 weights it computes in 16 bit by autocast, on 16-bit
    weights without it; DeepSpeed casts by itself."""
    num_ranks: int = 1
    """Data-parallel ranks under DeepSpeed. Above 1 the process is rank 0 of them, with collectives that
    exchange nothing: its tensors are those of a rank, its losses mean nothing."""
    memory_limit_bytes: int | None = None
    """Limit of torch's allocations on the GPU; on the CPU, of memory mapped beyond the imports: private
    writable mappings (getrlimit(2), RLIMIT_DATA). None for no limit."""
    waits: bool = False
    """True if the process, once it has imported everything, waits for a line on stdin before it touches the
    device."""

    @property
    def batch_size(self) -> int:
        """Samples of an optimizer step."""
        return (self.strategy.micro_batch_size or 1) * (self.strategy.gradient_accumulation_steps or 1)


def spec_to_json(spec: TrialSpec) -> str:
    """Return the text of a spec file."""
    return json.dumps(dataclasses.asdict(spec), indent=2) + "\n"


def spec_from_json(text: str) -> TrialSpec:
    """Return the spec that spec_to_json() wrote."""
    return parse_strictly(TrialSpec, text)


class TrialState(StrEnum):
    """How a trial ended."""

    DONE = "done"
    OUT_OF_MEMORY = "out of memory"
    """The allocator said so."""
    KILLED = "killed"
    """A signal ended the process."""
    TOO_SLOW = "over the time limit"
    CANNOT_RUN = "can't run here"
    """Something is missing that it needs."""
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBytes:
    """Bytes of tensors by their purpose."""

    weights: int
    """Parameters and buffers."""
    gradients: int
    """Of all parameters, before a step."""
    optimizer_states: int
    activations: int | None
    """Alive at the end of a micro-batch's forward pass, without the batch itself; None where not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialMeasurement:
    """The measurements of one trial, in a process of its own."""

    process_bytes: int
    """Peak of the process's resident memory, over what it held once all was imported."""
    process_peak_bytes: int
    """The same peak as the kernel states it (VmHWM)."""
    allocated_bytes: int | None = None
    """Peak of torch's tensors on the GPU; None on the CPU."""
    reserved_bytes: int | None = None
    """Peak of what torch's allocator held."""
    device_bytes: int | None = None
    """GPU memory of the process at its peak: beside torch's memory, the driver's count after the
    last step, by device_process_bytes where it tells processes apart, else by device_used_bytes; and
    reserved_bytes."""
    device_process_bytes: int | None = None
    """NVML's count for this process after the last step; None where it does not know it, as in a
    container."""
    device_used_bytes: int | None = None
    """How much more all processes together hold of the GPU after the last step than before CUDA started."""
    context_bytes: int | None = None
    """The driver's count for the process once CUDA has started, before its first tensor."""
    step_times_s: tuple[float, ...]
    """Of each timed optimizer step."""
    step_time_s: float
    """Their median."""
    tokens_per_s: float
    losses: tuple[float, ...]
    """Before each step of the warm-up, which runs without dropout, so that trials can be compared."""
    counted: TensorBytes | None
    """None under DeepSpeed, whose partitions and buffers are no tensors of the model."""
    num_trained_parameters: int
    num_threads: int
    """Threads of torch on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """How one trial ended."""

    state: TrialState
    reason: str = ""
    """Why, where it is not done: one line."""
    measured: TrialMeasurement | None = None
    """Its measurements; None unless it is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPrediction:
    """The estimator's prediction of one trial."""

    parts: TensorBytes | None
    """None under DeepSpeed, where none are counted."""
    allocated_bytes: int | None = None
    """Peak of the tensors on the GPU; None where there is no GPU to predict for."""
    reserved_bytes: int | None = None
    """Peak of what torch's allocator holds."""
    device_bytes: int | None = None
    """With the CUDA context; without NCCL, as many ranks are measured in one, among collectives that do
    nothing."""
    step_time_s: float | None = None
    """None where the GPU's rates are not known, and of many ranks, which exchange nothing."""


def peak_of(measured: TrialMeasurement) -> int:
    """Return the peak by which trials are compared: torch's on a GPU, else the process's."""
    return measured.process_bytes if measured.allocated_bytes is None else measured.allocated_bytes
