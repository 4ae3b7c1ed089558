"""The script as it is: the strategy that it runs by itself, and whether another one is worth a change."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.core.strategy import Strategy
from zerofit.planning.plan_from_flags import fields_said

if TYPE_CHECKING:
    from zerofit.planning.problem import Problem
    from zerofit.planning.search import EstimatedStrategy


def script_as_it_is(problem: Problem) -> Strategy | None:
    """Return the strategy of the script without zerofit.

    None without a script, and for one that asks for DeepSpeed or FSDP, whose settings no capture holds.
    """
    script = problem.script
    if script is None or script.capture.engine:
        return None
    size = script.micro_batch_size
    return Strategy(
        precision=script.capture.precision or problem.own_precision,
        micro_batch_size=size,
        gradient_accumulation_steps=None if size is None else script.capture.passes_per_step,
        gradient_checkpointing=script.capture.model.checkpoints,
    )


def script_with_flags(problem: Problem) -> Strategy | None:
    """Return the script's own strategy with what the user's flags say; it may be no candidate."""
    own = script_as_it_is(problem)
    if own is None or problem.takes_fastest:
        return None
    settled = {name: pin.values[0] for name, pin in problem.constraints.settled().items()}
    own = replace(own, **{**settled, **fields_said(problem.request)})
    total, size = problem.workload.global_batch_size, own.micro_batch_size
    if total is None or size is None:
        return own
    return replace(own, gradient_accumulation_steps=total // (size * problem.topology.data_parallel_size))


def wins(other: EstimatedStrategy, own: EstimatedStrategy) -> bool:
    """Return True if another strategy is faster than the script's own by more than its uncertainty."""
    time, own_time = other.estimate.step_time, own.estimate.step_time
    if time is None or own_time is None:
        return False
    return time.seconds * (1 + time.uncertainty) < own_time.seconds
