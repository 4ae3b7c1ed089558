"""What a ladder of strategies measured, rung by rung, beside what was predicted; to and from JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from enum import StrEnum

from zerofit.core.errors import UserError
from zerofit.core.facts import Versions
from zerofit.core.strategy import Strategy
from zerofit.core.validation import STRICT

LADDER_VERSION = 1
"""Raised whenever a file of before can no longer be read as it was meant."""


class RungState(StrEnum):
    """How a rung ended."""

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
class Parts:
    """Bytes of tensors by what they are for."""

    weights: int
    """Parameters and buffers."""
    gradients: int
    """Of all parameters, before a step."""
    optimizer_states: int
    activations: int | None
    """Alive at the end of a micro-batch's forward pass, without the batch itself; None where not counted."""

    __pydantic_config__ = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one rung took, in a process of its own."""

    process_bytes: int
    """Peak of the process's resident memory, over what it held once all was imported."""
    process_peak_bytes: int
    """The same peak as the kernel states it (VmHWM)."""
    allocated_bytes: int | None = None
    """Peak of torch's tensors on the GPU; None on the CPU."""
    reserved_bytes: int | None = None
    """Peak of what torch's allocator held."""
    device_bytes: int | None = None
    """What the process held of the GPU at its peak: beside torch's memory what the driver counts after the
    last step, by device_process_bytes where it tells processes apart, else by device_used_bytes; and
    reserved_bytes."""
    device_process_bytes: int | None = None
    """What NVML says after the last step of this very process; None where it does not know it, as in a
    container."""
    device_used_bytes: int | None = None
    """How much more all processes together hold of the GPU after the last step than before CUDA started."""
    context_bytes: int | None = None
    """What the driver said that the process held once CUDA had started, before its first tensor."""
    step_times_s: tuple[float, ...]
    """Of each timed optimizer step."""
    step_time_s: float
    """Their median."""
    tokens_per_s: float
    losses: tuple[float, ...]
    """Before each step of the warm-up, which runs without dropout, so that rungs can be compared."""
    counted: Parts | None
    """None under DeepSpeed, whose partitions and buffers are no tensors of the model."""
    num_trained_parameters: int
    num_threads: int
    """Threads of torch on the CPU."""

    __pydantic_config__ = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one rung ended."""

    state: RungState
    reason: str = ""
    """Why, where it is not done: one line."""
    measured: Measured | None = None
    """What it took; None unless it is done."""

    __pydantic_config__ = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What zerofit's estimator says of one rung."""

    parts: Parts | None
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

    __pydantic_config__ = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What others measured of one rung, of the same model and sizes."""

    memory_g: float
    """As printed, in "G"."""
    epoch_time_s: float

    __pydantic_config__ = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class RungResult:
    """One rung."""

    name: str
    """As the user named it."""
    label: str
    """In words: "+ Adafactor"."""
    strategy: Strategy
    """All that the rung trains under, its own change and those before it."""
    sequence_length: int
    outcome: Outcome
    predicted: Predicted | None = None
    published: Published | None = None

    __pydantic_config__ = STRICT

    @property
    def measured(self) -> Measured | None:
        """What it took; None unless it ran to its end."""
        return self.outcome.measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """A whole ladder on one machine."""

    model: str
    architecture: str
    num_parameters: int
    batch_size: int
    """Samples of an optimizer step on the measured rank, on each rung."""
    sequence_length: int
    """Tokens of a sample, where no rung says otherwise."""
    device: str
    """The GPU's name, or "CPU"."""
    is_cumulative: bool
    """Whether each rung stands on those before it."""
    predicted_for: str | None
    """The GPU that the prediction is for; None without one."""
    versions: Versions
    rungs: tuple[RungResult, ...]
    num_ranks: int = 1
    """Data-parallel ranks, of which rank 0 was measured; above 1 its collectives did nothing."""
    version: int = LADDER_VERSION
    """Version of this file format."""

    __pydantic_config__ = STRICT

    @property
    def on_cpu(self) -> bool:
        """Whether it was measured on the CPU."""
        return self.device == CPU


CPU = "CPU"
"""What a ladder calls the device that is no GPU."""


def peak_of(measured: Measured) -> int:
    """Return the memory by which rungs are compared: torch's peak on a GPU, else the process's."""
    return measured.process_bytes if measured.allocated_bytes is None else measured.allocated_bytes


def ladder_to_json(ladder: Ladder) -> str:
    """Return a ladder as the text of a file."""
    return json.dumps(dataclasses.asdict(ladder), indent=2) + "\n"


def ladder_from_json(text: str, *, name: str) -> Ladder:
    """Return the ladder that a text holds.

    Args:
        text: what ladder_to_json() wrote.
        name: the file's name, for the message.

    Raises:
        UserError: it is no JSON, is of another version, or has a field too many or too few.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        document = json.loads(text)
    except ValueError as error:
        raise _broken(name, str(error), "it is not whole JSON") from None
    version = document.get("version") if isinstance(document, dict) else None
    if version != LADDER_VERSION:
        why = f"this zerofit reads ladders of version {LADDER_VERSION}"
        raise _broken(name, f"version {version!r}", why)
    try:
        return TypeAdapter(Ladder).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        why = "every field must be known and of its type"
        raise _broken(name, f"{place}: {first['msg']}", why) from None


def _broken(name: str, found: str, why: str) -> UserError:
    return UserError(
        "ladder-file-broken",
        "the file of a ladder can't be read",
        found=f"{found}   ({name})",
        why=why,
        fix="measure it anew: zerofit bench ladder --json",
    )
