"""Options of planning: model and lengths, what may change, what stays free, and another machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from zerofit.core.strategy import Lora, Precision
from zerofit.models.task import Task

if TYPE_CHECKING:
    from zerofit.core.estimates import RunPhase

DEFAULT_RESERVE = 0.05
"""ASSUMPTION: share of GPU memory kept free for what a longer run adds and the estimate misses."""


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


class Loop(StrEnum):
    """The training loop, which decides how long the model's outputs stay alive."""

    PLAIN = "plain"
    """`outputs = model(**batch)`, as in scripts with accelerate: outputs live until the next replace them."""
    TRAINER = "trainer"
    """transformers' Trainer, which frees them once it has the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlags:
    """The flags about model and workload."""

    model: str | None = None
    sequence_length: int | None = None
    target_length: int | None = None
    task: Task | None = None
    is_padded: bool | None = None
    loop: Loop | None = None
    dtype: Precision | None = None
    """Format in which the weights are loaded; None for the checkpoint's."""
    trust_remote_code: bool = False
    allow: frozenset[Allow] = frozenset()
    reserve: Reserve = field(default_factory=lambda: Reserve(share=DEFAULT_RESERVE))
    expandable_segments: bool = False
    is_fast: bool = False
    prefers_speed: bool = False
    allowed_lora: Lora | None = None
    """Adapters to use if the user allows them without asking for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFlags:
    """The flags that describe another machine."""

    gpus: str | None = None
    host_ram: str | None = None
    nvme: str | None = None
    cpu_cores: int | None = None
    network: str | None = None
    host_bandwidth: str | None = None
