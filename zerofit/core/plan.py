"""Plan: one strategy on one machine, with the reason for each value; JSON in and out."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from zerofit.core.capture import CAPTURE_VERSION, Capture
from zerofit.core.errors import UserError
from zerofit.core.estimates import Estimate
from zerofit.core.facts import Machine, ModelFacts, Versions, Workload
from zerofit.core.json_text import parse_json
from zerofit.core.strategy import Strategy, describe_strategy
from zerofit.core.units import format_bytes
from zerofit.core.validation import check_at_least, parse_strictly

LARGEST_PLAN = 256 * 1024 * 1024
"""Bytes of a plan file; one with a long capture has some MB. ASSUMPTION."""
PLAN_VERSION = 1
"""Raised whenever older plan files can no longer be read correctly."""


RUN_SETTINGS = ("is_checked", "generate_limit_s", "saves_when_told", "trusts_checkpoint")
"""Fields of a plan that flags set for the run, whatever its strategy: a recovery's plan keeps them."""
GENERATE_LIMIT_S = 300
"""ASSUMPTION: ranks reach a call within minutes of each other; NCCL times out after 10 by default
(torch/distributed/constants.py, default_pg_nccl_timeout)."""


class Origin(StrEnum):
    """Who chose a value."""

    FLAG = "flag"
    FILE = "file"
    """A configuration file, or the script's own arguments."""
    PRESET = "preset"
    DEFAULT = "default"
    PLANNER = "planner"
    """`zerofit plan`, which compared estimates."""
    SCRIPT = "script"
    """The captured script, which allows nothing else."""


BY_USER = (Origin.FLAG, Origin.FILE)
"""Origins of values that the user set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why one field of the strategy or the topology has its value."""

    field: str
    """Name of the Strategy field, or of on_cpu or the size of a group in the topology."""
    value: str
    """The value as displayed."""
    origin: Origin
    """Who chose it."""
    why: str
    """One sentence."""


CPU_REASON = Reason(field="on_cpu", value="on", origin=Origin.FLAG, why="--cpu says so")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A strategy that was considered and not chosen."""

    strategy: Strategy
    why: str
    """One sentence."""


GROUP_FLAGS = {
    "tensor_parallel_size": "--tensor-parallel-size",
    "sequence_parallel_size": "--sequence-parallel-size",
    "pipeline_parallel_size": "--pipeline-parallel-size",
    "pipeline_stages_per_rank": "--pipeline-stages-per-rank",
    "dp_replicate_size": "--dp-replicate-size",
}
"""Fields of Topology that say how ranks share samples or weights, and their flags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The processes of a run."""

    num_nodes: int = 1
    """Number of nodes."""
    world_size: int = 1
    """Ranks on all nodes together."""
    on_cpu: bool = False
    """True if the ranks run on the CPU, even if there are GPUs."""
    tensor_parallel_size: int = 1
    """Consecutive ranks that share the layers of one copy of the model and get the same samples."""
    sequence_parallel_size: int = 1
    """Consecutive ranks that share the tokens of the same samples, each with whole layers."""
    pipeline_parallel_size: int = 1
    """Consecutive ranks that each hold stages of a copy of the model and get the same samples."""
    pipeline_stages_per_rank: int = 1
    """Stages that each of them holds: stage i is on rank i modulo pipeline_parallel_size."""
    stage_blocks: tuple[int, ...] = ()
    """Blocks of each stage; empty where they are shared by time alone."""
    dp_replicate_size: int = 1
    """FSDP2's hybrid sharding: copies of the sharded weights, as accelerate's
    parallelism_config_dp_replicate_size. Consecutive ranks share a copy."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, *(field.name for field in dataclasses.fields(self) if field.type == "int"))
        if self.is_interleaved and self.pipeline_parallel_size == 1:
            raise ValueError(f"pipeline_stages_per_rank: {self.pipeline_stages_per_rank} without a pipeline")
        if self.stage_blocks and len(self.stage_blocks) != self.num_stages:
            raise ValueError(f"stage_blocks: {len(self.stage_blocks)} numbers for {self.num_stages} stages")
        if any(blocks < 1 for blocks in self.stage_blocks):
            raise ValueError(f"stage_blocks: a stage has at least one block, not {min(self.stage_blocks)}")
        if self.world_size % self.num_nodes:
            raise ValueError(f"world_size: {self.world_size} ranks do not divide over {self.num_nodes} nodes")
        if self.world_size % self.sample_group_size:
            raise ValueError(
                f"world_size: {self.world_size} ranks are no whole groups of {self.sample_group_size}"
            )
        if self.num_replicas % self.dp_replicate_size:
            raise ValueError(
                f"dp_replicate_size: {self.num_replicas} ranks do not divide into "
                f"{self.dp_replicate_size} copies"
            )

    @property
    def sample_group_size(self) -> int:
        """Consecutive ranks that get the same samples: 1 with data parallelism alone."""
        return self.tensor_parallel_size * self.sequence_parallel_size * self.pipeline_parallel_size

    @property
    def is_interleaved(self) -> bool:
        """True if each rank of a pipeline holds several stages."""
        return self.pipeline_stages_per_rank > 1

    @property
    def num_stages(self) -> int:
        """Stages of one copy of the model: 1 without pipeline parallelism."""
        return self.pipeline_parallel_size * self.pipeline_stages_per_rank

    @property
    def data_parallel_size(self) -> int:
        """Groups of ranks with samples of their own: the number of ranks with data parallelism alone."""
        return self.world_size // self.sample_group_size

    @property
    def num_replicas(self) -> int:
        """Ranks that train the same weights: over them gradients are summed, and ZeRO partitions."""
        return self.world_size // (self.tensor_parallel_size * self.pipeline_parallel_size)

    @property
    def dp_shard_size(self) -> int:
        """Ranks that FSDP2 shards one copy of the weights over (accelerate's dp_shard_size)."""
        return self.num_replicas // self.dp_replicate_size

    @property
    def ranks_per_node(self) -> int:
        """Ranks on one node."""
        return self.world_size // self.num_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSteps:
    """Length of a trial of `zerofit tune`, and where the user's files are backed up during it."""

    num_warm_up: int
    """Optimizer steps before the timed ones; at least 1, since a step is timed from the end of the one
    before."""
    num_timed: int
    """Optimizer steps that are timed; all ranks stop after the last."""
    guard: str
    """Folder with a record and copies of the files that the script is about to change."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "num_warm_up", "num_timed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The strategy that will run, where, and why."""

    strategy: Strategy
    topology: Topology
    machine: Machine
    versions: Versions
    workload: Workload = dataclasses.field(default_factory=Workload)
    model: ModelFacts | None = None
    trains: bool = True
    """False if the run only evaluates or generates, without gradients and an optimizer."""
    is_checked: bool = True
    """True if a violated rule ends the run."""
    generate_limit_s: int = GENERATE_LIMIT_S
    """How long a rank waits before model.generate for the others to call it too, under ZeRO-3; 0 does not
    wait."""
    recovers: bool = False
    """True if an out-of-memory error restarts the run with another plan."""
    resume_from: str | None = None
    """The checkpoint to resume from after a run that was out of memory."""
    saves_when_told: bool = False
    """True if SIGUSR1 makes all ranks save a checkpoint and stop."""
    trusts_checkpoint: bool = False
    """True if a checkpoint that is resumed may run code."""
    trial: TrialSteps | None = None
    """Set for a trial: the run ends after a few steps and leaves no file changed."""
    reasons: tuple[Reason, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    estimate: Estimate | None = None
    """The strategy's estimate, if the plan was made by `zerofit plan`."""
    capture: Capture | None = None
    """The capture without its own cost; None if the script was not captured."""
    version: int = PLAN_VERSION
    """Version of this file format."""

    def __str__(self) -> str:
        return "\n".join(plan_lines(self))

    def is_default(self, field: str) -> bool:
        """Return True if nobody chose the value of this Strategy field."""
        return any(reason.field == field and reason.origin is Origin.DEFAULT for reason in self.reasons)

    def is_set_by_user(self, field: str) -> bool:
        """Return True if the user set this Strategy field, on the command line or in a file."""
        return field in self.typed_fields

    @property
    def typed_fields(self) -> frozenset[str]:
        """Fields of the strategy that the user set; the others were planned or are defaults."""
        return frozenset(reason.field for reason in self.reasons if reason.origin in BY_USER)

    @property
    def asks_for_cpu(self) -> bool:
        """True if the plan was made with --cpu."""
        return CPU_REASON in self.reasons


_NUMBERS = re.compile(r"\[\n\s+((?:[-+.\deE]+,?\s+)+)\]")
"""Matches a list of numbers, one per line; strings in JSON contain no newlines."""


def plan_to_json(plan: Plan) -> str:
    """Return the plan as the text of a plan file; a list of numbers, such as lengths, takes one line."""
    fields = {**dataclasses.asdict(plan), "topology": topology_fields(plan.topology)}
    return _NUMBERS.sub(
        lambda found: "[" + " ".join(found[1].split()) + "]", json.dumps(fields, indent=2) + "\n"
    )


def topology_fields(topology: Topology) -> dict[str, Any]:
    """Return the topology for a file; sizes of unused parallelism are left out."""
    document = dataclasses.asdict(topology)
    for name in GROUP_FLAGS:
        if document[name] == 1:
            del document[name]
    if not document["stage_blocks"]:
        del document["stage_blocks"]
    return document


def plan_from_json(text: str, *, name: str) -> Plan:
    """Return the plan in the text of a plan file.

    Args:
        text: the file's text.
        name: the file's name, for the message.

    Raises:
        UserError: the text is no JSON, is truncated, has an unknown or missing field, or has another version.
    """
    try:
        document = parse_json(text)
    except ValueError as error:
        raise _broken(name, f"{error}", "it is incomplete JSON, as after an interrupted write") from None
    version = document.get("version") if isinstance(document, dict) else None
    if version != PLAN_VERSION:
        raise _broken(
            name,
            f"version {version!r}" if version is not None else "no version field",
            f"this zerofit reads plan files of version {PLAN_VERSION}",
        )

    from pydantic import ValidationError

    try:
        plan = parse_strictly(Plan, text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][1:])
        if first["type"] == "value_error":  # raised by the value; begins with the field's name
            found = f"{place}.{first['ctx']['error']}"
        else:
            found = f"{place}: {first['msg']}"
        raise _broken(name, found, "every field must be known, of the right type and in range") from None
    if plan.capture is not None and plan.capture.version != CAPTURE_VERSION:
        found = f"capture.version: {plan.capture.version}"
        raise _broken(name, found, f"this zerofit reads captures of version {CAPTURE_VERSION}")
    return plan


def _broken(name: str, found: str, why: str) -> UserError:
    return UserError(
        "plan-file-broken",
        "the plan file can't be read",
        found=f"{found}   ({name})",
        why=why,
        fix="write the plan again, or leave out --plan",
    )


def plan_lines(plan: Plan) -> tuple[str, ...]:
    """Return the plan as lines: the machine, the strategy, then one line per reason."""
    width = max((len(reason.field) for reason in plan.reasons), default=0)
    reasons = [
        f"  {reason.field:<{width}}  {reason.value}: {reason.why} ({reason.origin.value})"
        for reason in plan.reasons
    ]
    return (*head_lines(plan), *reasons)


def head_lines(plan: Plan) -> tuple[str, ...]:
    """Return the machine and the strategy, one line each."""
    return (
        f"machine:  {describe_machine(plan.machine)}",
        f"strategy: {describe_strategy(plan.strategy)} on {_ranks(plan)}",
    )


def describe_machine(machine: Machine) -> str:
    """Return a node in one line."""
    kinds = Counter(f"{gpu.name} ({format_bytes(gpu.memory_bytes)})" for gpu in machine.gpus)
    gpus = [f"{count} x {kind}" for kind, count in kinds.items()] or ["no GPU"]
    cores = f"{machine.num_cpu_cores} core{'s' if machine.num_cpu_cores > 1 else ''}"
    memory = f"{format_bytes(machine.host_memory_available_bytes)} of RAM free"
    return ", ".join((*gpus, cores, memory))


def _ranks(plan: Plan) -> str:
    topology = plan.topology
    kind = "CPU" if topology.on_cpu else "GPU"
    ranks = f"{topology.world_size} {kind} rank{'s' if topology.world_size > 1 else ''}"
    if topology.tensor_parallel_size > 1:
        ranks += f" in tensor-parallel groups of {topology.tensor_parallel_size}"
    if topology.sequence_parallel_size > 1:
        ranks += f" in sequence-parallel groups of {topology.sequence_parallel_size}"
    if topology.pipeline_parallel_size > 1:
        each = f", {topology.pipeline_stages_per_rank} on a rank" if topology.is_interleaved else ""
        ranks += f" in pipelines of {topology.num_stages} stages{each}"
    return f"{ranks} on {topology.num_nodes} nodes" if topology.num_nodes > 1 else ranks
