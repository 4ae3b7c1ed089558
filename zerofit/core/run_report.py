"""RunReport: a run as numbers and known words only, to be published; no name, path, host or argument."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import re
from dataclasses import dataclass
from typing import Any

from zerofit.core.estimates import RunPhase
from zerofit.core.rank_observation import Phase
from zerofit.core.strategy import (
    Buckets,
    Engine,
    OffloadDevice,
    OptimizerName,
    Precision,
    Quantization,
    StateDictType,
    ZeroStage,
)
from zerofit.core.validation import parse_strictly

REPORT_VERSION = 1
"""Raised whenever a field changes its meaning or is removed."""
LARGEST_REPORT = 1 << 20
"""Bytes of a report's file; one has some 4 kB. ASSUMPTION."""
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
"""A class, a catalog's id or name: what a report's text fields may contain."""
_VERSION = re.compile(
    r"\d{1,4}(\.\d{1,8}){0,3}((a|b|rc|\.post|\.dev)\d{1,8})?(\+(cpu|cu\d{2,3}|rocm\d(\.\d){1,2}))?"
)
"""A released version, with no local part but torch's own, which names its CUDA or ROCm."""


class Attention(enum.StrEnum):
    """transformers' own implementations of attention; another name is OTHER."""

    EAGER = "eager"
    SDPA = "sdpa"
    FLASH_2 = "flash_attention_2"
    FLASH_3 = "flash_attention_3"
    FLEX = "flex_attention"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedModel:
    """The shape of a model; 0 where a number is unknown."""

    class_name: str | None
    """A class of transformers; None for any other."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_token: int
    num_trained: int
    """Elements of the parameters that get gradients."""
    num_frozen: int
    weight_dtype: Precision | None
    """As the script makes the weights; None if unknown, or another format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedStrategy:
    """A Strategy and a topology without names and paths."""

    engine: Engine
    zero_stage: ZeroStage
    optimizer_offload: OffloadDevice
    param_offload: OffloadDevice
    pin_memory: bool
    precision: Precision | None
    """As the run trained: the strategy's, else the script's."""
    micro_batch_size: int | None
    gradient_accumulation_steps: int | None
    clips_gradients: bool
    gradient_checkpointing: bool | None
    checkpoint_every: int
    activation_offload: bool
    optimizer: OptimizerName | None
    """What replaces the script's."""
    script_optimizer: str | None
    """The script's own, by its id in zerofit's table of optimizers; None for another."""
    attention: Attention | None
    compile: bool
    freezes: bool
    lora_rank: int | None
    quantization: Quantization | None
    quant_storage: Precision | None
    tf32: bool | None
    liger: bool
    group_by_length: bool
    buckets: Buckets
    reshard_after_forward: bool
    state_dict_type: StateDictType
    num_nodes: int
    world_size: int
    on_cpu: bool
    tensor_parallel_size: int
    sequence_parallel_size: int
    pipeline_parallel_size: int
    pipeline_stages_per_rank: int
    dp_replicate_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedWorkload:
    """The work of one optimizer step."""

    global_batch_size: int | None
    sequence_length: int | None
    target_length: int | None
    is_padded: bool
    keeps_outputs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedGpu:
    """The GPUs of one kind in a node."""

    name: str | None
    """As in `zerofit gpus`; None for another."""
    count: int
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedPhase:
    """What a plan predicted of one phase, on the GPU that needs most."""

    phase: RunPhase
    tensors_bytes: int
    """Live tensors: beside it stands `allocated_bytes`."""
    reserved_bytes: int
    """With the allocator's cache: beside it stands `reserved_bytes`."""
    total_bytes: int
    """With what is outside PyTorch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What the plan predicted."""

    phases: tuple[PredictedPhase, ...]
    uncertainty: float
    host_bytes: int
    """Of one node, for all its ranks."""
    step_time_s: float | None
    step_time_uncertainty: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPhase:
    """The largest peak of a phase over all ranks; a phase that did not raise a rank's peak has none."""

    phase: Phase
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the run's ranks recorded."""

    num_ranks: int
    """Ranks that left a record."""
    num_steps: int
    """Optimizer steps of the slowest."""
    phases: tuple[MeasuredPhase, ...]
    """Empty without a GPU."""
    allocated_bytes: int | None
    reserved_bytes: int | None
    host_bytes: int
    """Peak resident memory of the largest rank."""
    step_time_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedRecovery:
    """One restart with another plan."""

    step: int | None
    lost_steps: int | None
    resumed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedEnd:
    """How the run ended."""

    exit_code: int
    kind: str | None
    """Of zerofit.launching.diagnose.EndKind; None on success."""
    phase: Phase | None
    cause: str | None
    """The failure's id in `zerofit explain`; None if it ended well, or for no known reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """A run, to be compared with what was predicted of it."""

    model: ReportedModel | None
    """None if the script was not captured."""
    workload: ReportedWorkload
    strategy: ReportedStrategy
    versions: dict[str, str]
    """By package: released versions; "other" for a build of one's own."""
    gpus: tuple[ReportedGpu, ...]
    """Of one node."""
    predicted: Predicted | None
    """None without a plan for these GPUs."""
    measured: Measured
    recoveries: tuple[ReportedRecovery, ...]
    end: ReportedEnd | None
    """None if the run left no record of its end."""
    version: int = REPORT_VERSION

    def __post_init__(self) -> None:
        """Check what may stand in text fields.

        Raises:
            ValueError: one contains something else.
        """
        if self.version != REPORT_VERSION:
            raise ValueError(f"version: {self.version} is not {REPORT_VERSION}")
        texts = [
            self.model and self.model.class_name,
            self.strategy.script_optimizer,
            *(gpu.name for gpu in self.gpus),
            *((self.end.kind, self.end.cause) if self.end else ()),
            *self.versions,
        ]
        for text in texts:
            if text is not None and not _WORD.fullmatch(text):
                raise ValueError(f"a text is none that a report may contain: {len(text)} characters")
        if any(plain_version(release) != release for release in self.versions.values()):
            raise ValueError("versions: one is no released version")


def plain_version(text: str) -> str:
    """Return a released version as it is, and "other" for anything else."""
    return text if _VERSION.fullmatch(text) else "other"


def plain_number(number: float | None) -> float | None:
    """Return a finite number from 0 to 1e15 in four digits; None for any other."""
    if number is None or not math.isfinite(number) or not 0 <= number <= 1e15:
        return None
    return float(f"{number:.4g}")


def plain_count(number: int | None) -> int | None:
    """Return a whole number from 0 to 1e15; None for any other."""
    return number if number is not None and 0 <= number <= 10**15 else None


def report_to_json(report: RunReport) -> str:
    """Return the text of a report's file."""
    return json.dumps(dataclasses.asdict(report), indent=2, default=_plain, allow_nan=False) + "\n"


def report_from_json(text: str) -> RunReport:
    """Return the report in a text, which may come from anyone.

    Raises:
        ValueError: it is none.
    """
    return parse_strictly(RunReport, text)


def _plain(value: Any) -> Any:
    """Return what stands for a value in JSON."""
    if isinstance(value, enum.Enum):
        return value.value
    raise TypeError(f"{type(value)} is no part of a report")
