"""Which of the engines that shard is tried first, and whether FSDP2 may shard a model at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.core.strategy import Engine

if TYPE_CHECKING:
    from zerofit.core.strategy import Strategy
    from zerofit.planning.problem import Problem


def first_engine(problem: Problem) -> tuple[Engine, str]:
    """Return the sharding engine that wins among equals, and why, in one phrase."""
    said = problem.said.get("engine")
    if said in (Engine.DEEPSPEED, Engine.FSDP2):
        return said, f"{problem.said.where('engine')} says so"
    if problem.script is not None and problem.script.capture.engine.startswith("FSDP"):
        return Engine.FSDP2, "the script names FSDP"
    if problem.spec.is_here and problem.versions.deepspeed is None:
        return Engine.FSDP2, "DeepSpeed is not installed"
    if problem.script is not None and problem.script.capture.engine:
        return Engine.DEEPSPEED, f"the script names {problem.script.capture.engine}"
    return Engine.DEEPSPEED, "nobody names FSDP"


def tries_fsdp2_first(problem: Problem) -> bool:
    """Return True if FSDP2 is what the script, a flag or this machine has."""
    return allows_fsdp2(problem) and first_engine(problem)[0] is Engine.FSDP2


def allows_fsdp2(problem: Problem) -> bool:
    """Return True if FSDP2 may shard this problem's model at all; the rules say more."""
    said, topology = problem.said, problem.topology
    if said.get("engine") is Engine.FSDP2:
        return True
    is_open = not said.has("engine") and not said.get("zero_stage")
    return is_open and topology.dp_shard_size > 1 and topology.sample_group_size == 1 and not topology.on_cpu


def is_fsdp2(strategy: Strategy) -> bool:
    """Return True if FSDP2 runs a strategy."""
    return strategy.engine is Engine.FSDP2
