"""Stores a finished run's peak memory and step time in this machine's observations, for later plans."""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from zerofit.launching.diagnose import EndKind
from zerofit.machine.observations import Observation, ObservedPeak, subject_of, write_observation
from zerofit.scripts.target import script_path

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerofit.core.plan import Plan
    from zerofit.core.rank_observation import RankObservation
    from zerofit.launching.diagnose import RunEnd

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"


def store_observation(
    plan: Plan,
    target: tuple[str, ...],
    verdict: RunEnd,
    ranks: Mapping[int, RankObservation],
    *,
    peak_host_bytes: int,
    step_time_s: float | None,
) -> None:
    """Store the observation of a run that succeeded or ran out of GPU memory; others have no useful peak.

    Args:
        target: the script or `-m module`, and its arguments, which are not stored.
        ranks: the last state of each rank of this node.
        peak_host_bytes: peak resident memory of any rank.
        step_time_s: median time of an optimizer step; None if too few were seen.
    """
    is_out_of_memory = verdict.kind is EndKind.GPU_OUT_OF_MEMORY
    num_steps = min((rank.step for rank in ranks.values()), default=0)
    if not is_out_of_memory and (verdict.kind is not None or not num_steps):
        return
    estimate = None if plan.topology.on_cpu else plan.estimate  # which is for the GPUs planned for
    step_time = None if estimate is None else estimate.step_time
    observation = Observation(
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        script=script_path(target) or target[1],
        subject=subject_of(plan.capture, plan.workload),
        strategy=plan.strategy,
        topology=plan.topology,
        gpus=() if plan.topology.on_cpu else tuple(gpu.name for gpu in plan.machine.gpus),
        versions=plan.versions,
        num_steps=num_steps,
        is_out_of_memory=is_out_of_memory,
        peaks=_peaks(ranks, verdict),
        host_bytes=max([peak_host_bytes, *(rank.host_bytes for rank in ranks.values())]),
        step_time_s=step_time_s,
        predicted_bytes=None if estimate is None else estimate.device.peak_bytes,
        predicted_step_time_s=None if step_time is None else step_time.seconds,
        expandable_segments=any(_EXPANDABLE in os.environ.get(name, "") for name in _ALLOCATOR),
    )
    try:
        write_observation(observation)
    except OSError as error:  # the run's result does not depend on whether it can be stored
        print(f"zerofit: the run's measurements are not stored for later plans: {error}", file=sys.stderr)


def _peaks(ranks: Mapping[int, RankObservation], verdict: RunEnd) -> tuple[ObservedPeak, ...]:
    """Return the peak of each phase over all ranks, including a failed allocation."""
    largest: dict[str, ObservedPeak] = {}
    for rank in ranks.values():
        for phase, peak in rank.peaks.items():
            before = largest.get(phase.name)
            largest[phase.name] = ObservedPeak(
                phase=phase,
                allocated_bytes=max(peak.allocated_bytes, before.allocated_bytes if before else 0),
                reserved_bytes=max(peak.reserved_bytes, before.reserved_bytes if before else 0),
            )
    if verdict.kind is EndKind.GPU_OUT_OF_MEMORY and verdict.peak_bytes and verdict.phase:
        before = largest.get(verdict.phase.name)
        largest[verdict.phase.name] = ObservedPeak(
            phase=verdict.phase,
            allocated_bytes=max(verdict.peak_bytes, before.allocated_bytes if before else 0),
            reserved_bytes=max(verdict.peak_bytes, before.reserved_bytes if before else 0),
        )
    return tuple(largest.values())
