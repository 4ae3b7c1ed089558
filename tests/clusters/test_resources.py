"""The host memory that a job asks for: what the plan needs, and room for data."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning_problems import VERSIONS, machine

from zerofit.core.estimates import Estimate, Holder, MemoryEstimate, PhaseMemory, RunPhase, Term
from zerofit.core.plan import Plan, Topology
from zerofit.core.strategy import Strategy
from zerofit.core.units import GIB
from zerofit.launching.clusters.job import resources_of


def _memory(gib: int, holder: Holder, *, mapped: int = 0) -> MemoryEstimate:
    terms = tuple(
        Term(name=held, num_bytes=size * GIB, holder=held, formula="", source="")
        for held, size in ((holder, gib), (Holder.MAPPED, mapped))
    )
    return MemoryEstimate(
        phases=(PhaseMemory(phase=RunPhase.LOAD, terms=terms),), uncertainty=0.25, uncertainty_source=""
    )


def _plan(needed: int, *, mapped: int = 0, available: int = 512) -> Plan:
    return Plan(
        strategy=Strategy(),
        topology=Topology(world_size=8),
        machine=replace(
            machine(8),
            host_memory_bytes=available * GIB,
            host_memory_available_bytes=available * GIB,
        ),
        versions=VERSIONS,
        estimate=Estimate(
            device=_memory(1, Holder.TENSORS),
            host=_memory(needed, Holder.PAGEABLE, mapped=mapped),
            step_time=None,
            tokens_per_step=0,
        ),
    )


@pytest.mark.parametrize(
    ("plan", "gib"),
    [
        (_plan(40), 50 + 8 * 2),  # with its ±, and 2 GiB a rank
        (_plan(40, mapped=400), 50 + 8 * 2),  # the kernel takes pages of files back
        (_plan(40, available=60), 60),  # no more than a node has
        (_plan(40, available=45), 50),  # but what the plan may need
    ],
)
def test_a_job_asks_for_what_a_node_needs(plan: Plan, gib: int) -> None:
    assert resources_of(plan, wall_time_s=None, on_cpu=False).memory_bytes == gib * GIB


def test_without_an_estimate_a_job_asks_for_the_node() -> None:
    plan = replace(_plan(40), estimate=None)
    assert resources_of(plan, wall_time_s=None, on_cpu=False).memory_bytes == 512 * GIB
