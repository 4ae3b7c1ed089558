"""Plan: one strategy on one machine, with the reason for each choice; to and from JSON."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from zerofit.core.capture import CAPTURE_VERSION, Capture
from zerofit.core.errors import UserError
from zerofit.core.estimates import Estimate
from zerofit.core.facts import Machine, ModelFacts, Versions, Workload
from zerofit.core.json_text import parse_json
from zerofit.core.strategy import Strategy, describe_strategy
from zerofit.core.units import format_bytes
from zerofit.core.validation import check_at_least, parse_strictly

PLAN_VERSION = 1
"""Raised whenever a plan file of before can no longer be read as it was meant."""


GENERATE_LIMIT_S = 300
"""ASSUMPTION: ranks come to a call within minutes of each other; NCCL by itself gives up after 10
(torch/distributed/constants.py, default_pg_nccl_timeout)."""


class Origin(StrEnum):
    """Who chose a value."""

    FLAG = "flag"
    PRESET = "preset"
    DEFAULT = "default"
    PLANNER = "planner"
    """`zerofit plan`, which compared estimates."""
    SCRIPT = "script"
    """The captured script, of which nothing else can be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why one field of the strategy or the topology has its value."""

    field: str
    """Name of the Strategy field, or of on_cpu or the size of a group in the topology."""
    value: str
    """The value, as a person reads it."""
    origin: Origin
    """Who chose it."""
    why: str
    """One sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A strategy that was considered and lost."""

    strategy: Strategy
    why: str
    """One sentence."""


KINDS_OF_GROUPS = ("tensor", "sequence", "pipeline")
"""What ranks of a group share: layers, the tokens of samples, blocks. In the order of Topology's fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The processes of a run."""

    num_nodes: int = 1
    """Machines that take part."""
    world_size: int = 1
    """Ranks on all nodes together."""
    on_cpu: bool = False
    """True if the ranks run on the CPU, GPUs or not."""
    tensor_parallel_size: int = 1
    """Consecutive ranks that share the layers of one copy of the model, and take the same samples."""
    sequence_parallel_size: int = 1
    """Consecutive ranks that share the tokens of the same samples, each with whole layers."""
    pipeline_parallel_size: int = 1
    """Consecutive ranks that each hold one stage of a copy of the model, and take the same samples."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, *(one.name for one in dataclasses.fields(self) if one.type == "int"))
        if self.world_size % self.num_nodes:
            raise ValueError(f"world_size: {self.world_size} ranks do not divide over {self.num_nodes} nodes")
        if self.world_size % self.sample_group_size:
            raise ValueError(
                f"world_size: {self.world_size} ranks are no whole groups of {self.sample_group_size}"
            )

    @property
    def sample_group_size(self) -> int:
        """Consecutive ranks that take the same samples: 1 under data parallelism alone."""
        return self.tensor_parallel_size * self.sequence_parallel_size * self.pipeline_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Groups of ranks that each take their own samples: a rank each under data parallelism alone."""
        return self.world_size // self.sample_group_size

    @property
    def num_replicas(self) -> int:
        """Ranks that train the same weights: over them gradients are summed, and ZeRO partitions."""
        return self.world_size // (self.tensor_parallel_size * self.pipeline_parallel_size)

    @property
    def ranks_per_node(self) -> int:
        """Ranks on one node."""
        return self.world_size // self.num_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSteps:
    """How long a trial of `zerofit tune` trains, and what keeps the user's files meanwhile."""

    num_warm_up: int
    """Optimizer steps before the first that is timed; at least 1, as a step is timed from the one before."""
    num_timed: int
    """Optimizer steps that are timed; all ranks end after the last."""
    guard: str
    """Folder that notes and keeps what the script is about to change on disk."""

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
    """True if there are gradients and an optimizer; without, the run only evaluates or generates."""
    is_checked: bool = True
    """True if a broken rule ends the run."""
    generate_limit_s: int = GENERATE_LIMIT_S
    """How long a rank waits before model.generate until the others call it too, where ZeRO-3 partitions the
    model; 0 does not wait."""
    recovers: bool = False
    """True if a run that is out of memory goes on under another plan."""
    resume_from: str | None = None
    """The checkpoint with which a run goes on that was out of memory under another plan."""
    saves_when_told: bool = False
    """True if SIGUSR1 has the ranks save a checkpoint together and end."""
    trial: TrialSteps | None = None
    """Set where the run is only to be measured: it ends after some steps and leaves no file changed."""
    reasons: tuple[Reason, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    estimate: Estimate | None = None
    """The estimate of the strategy, where it came from `zerofit plan`."""
    capture: Capture | None = None
    """The capture of the script, without the capture's own cost; None where it was not
    captured."""
    version: int = PLAN_VERSION
    """Version of this file format."""

    def __str__(self) -> str:
        return "\n".join(plan_lines(self))

    def is_default(self, field: str) -> bool:
        """Return True if nobody asked for the value that this Strategy field has."""
        return any(reason.field == field and reason.origin is Origin.DEFAULT for reason in self.reasons)

    def is_from_flag(self, field: str) -> bool:
        """True if the user typed this field of the strategy on the command line."""
        return any(reason.field == field and reason.origin is Origin.FLAG for reason in self.reasons)

    @property
    def typed_fields(self) -> frozenset[str]:
        """Fields of the strategy that the user typed; the others were planned, or are defaults."""
        return frozenset(reason.field for reason in self.reasons if reason.origin is Origin.FLAG)


_NUMBERS = re.compile(r"\[\n\s+((?:[-+.\deE]+,?\s+)+)\]")
"""A list of numbers alone, one a line; a text in JSON holds no line ends."""


def plan_to_json(plan: Plan) -> str:
    """Return the plan as the text of a plan file; a list of numbers, such as lengths, is one line."""
    fields = {**dataclasses.asdict(plan), "topology": topology_fields(plan.topology)}
    return _NUMBERS.sub(
        lambda found: "[" + " ".join(found[1].split()) + "]", json.dumps(fields, indent=2) + "\n"
    )


def topology_fields(topology: Topology) -> dict[str, int]:
    """Return the topology for a file; it says nothing of a parallelism that is not used."""
    document = dataclasses.asdict(topology)
    for kind in KINDS_OF_GROUPS:
        if document[f"{kind}_parallel_size"] == 1:
            del document[f"{kind}_parallel_size"]
    return document


def plan_from_json(text: str, *, name: str) -> Plan:
    """Return the plan that the text of a plan file holds.

    Args:
        text: the file's text.
        name: the file's name, for the message.

    Raises:
        UserError: the text is no JSON, is cut off, has a field too many or too few, or is of another version.
    """
    try:
        document = parse_json(text)
    except ValueError as error:
        raise _broken(name, f"{error}", "it is not whole JSON, as of a write that was cut short") from None
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
        if first["type"] == "value_error":  # of a value's own checks; its text begins with the field's name
            found = f"{place}.{first['ctx']['error']}"
        else:
            found = f"{place}: {first['msg']}"
        raise _broken(name, found, "every field must be known, of its type and in its range") from None
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
        fix="write the plan anew, or leave out --plan",
    )


def plan_lines(plan: Plan) -> tuple[str, ...]:
    """Return the plan as lines: the machine, the strategy, one line a reason."""
    width = max((len(reason.field) for reason in plan.reasons), default=0)
    reasons = [
        f"  {reason.field:<{width}}  {reason.value}: {reason.why} ({reason.origin.value})"
        for reason in plan.reasons
    ]
    return (*head_lines(plan), *reasons)


def head_lines(plan: Plan) -> tuple[str, ...]:
    """Return the machine and the strategy, a line each."""
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
        ranks += f" in pipelines of {topology.pipeline_parallel_size} stages"
    return f"{ranks} on {topology.num_nodes} nodes" if topology.num_nodes > 1 else ranks
