"""A Plan as lines for a person: what runs, where, and why."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from zerofit.core.strategy import describe_strategy
from zerofit.core.units import format_bytes

if TYPE_CHECKING:
    from zerofit.core.facts import Machine
    from zerofit.core.plan import Plan


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
    return f"{ranks} on {topology.num_nodes} nodes" if topology.num_nodes > 1 else ranks
