"""What is said of a model, its workload and a machine that is not here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from zerofit.models.task import Task
from zerofit.planning.problem import Allow, Reserve


class Loop(StrEnum):
    """How the script runs a micro-batch, which decides how long the model's outputs stay."""

    PLAIN = "plain"
    """`outputs = model(**batch)`, as scripts with accelerate do: they stay until the next ones are there."""
    TRAINER = "trainer"
    """transformers' Trainer, which lets go of them once it has the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlags:
    """What the flags say of model and workload."""

    model: str | None
    sequence_length: int | None
    target_length: int | None
    task: Task | None
    is_padded: bool | None
    """None where it was not said."""
    loop: Loop | None
    """None where it was not said."""
    trust_remote_code: bool
    allow: frozenset[Allow]
    reserve: Reserve
    expandable_segments: bool
    is_fast: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFlags:
    """What the flags say of a machine that is not here."""

    gpus: str | None
    host_ram: str | None
    nvme: str | None
    cpu_cores: int | None
    network: str | None
    host_bandwidth: str | None
