"""A machine without GPUs, a plan that leaves everything to the script, and what a rank of its run does."""

from __future__ import annotations

from typing import Any

from zerofit.core.facts import Machine, Versions
from zerofit.core.plan import Plan, Topology
from zerofit.core.rank_observation import Phase, RankObservation
from zerofit.core.strategy import Strategy

NO_GPU = Machine(gpus=(), num_cpu_cores=2, host_memory_bytes=1, host_memory_available_bytes=1)
PLAN = Plan(
    strategy=Strategy(),
    topology=Topology(on_cpu=True),
    machine=NO_GPU,
    versions=Versions(python="3.12.4", zerofit="0.1.0"),
)


def observation(phase: Phase, **fields: Any) -> RankObservation:
    """Return what a rank of such a run does; all but its phase is 0 or empty where nothing is said."""
    nothing: dict[str, Any] = {
        "pid": 1,
        "step": 0,
        "num_steps": 0,
        "changed_at": 0.0,
        "longest_phase_s": 0.0,
        "dump_signal": 0,
        "dump_descriptor": 0,
        "host_bytes": 0,
        "checkpoint_step": 0,
        "checkpoint": "",
        "peaks": {},
    }
    return RankObservation(phase=phase, **{**nothing, **fields})
