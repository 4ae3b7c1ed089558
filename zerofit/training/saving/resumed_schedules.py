"""Schedules that go on where they were when a checkpoint is resumed on another number of ranks.

accelerate steps a prepared scheduler once for each rank and optimizer step (accelerate/scheduler.py, 1.15),
for which scripts make it as many times as long. A checkpoint has the count, and the length, of the former
ranks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from zerofit.core.upstream.torch import counted_schedule, scheduled_rates

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zerofit.training.changes import Changes

State = dict[str, Any]


def own_states(wrappers: Iterable[Any]) -> list[tuple[Any, State]]:
    """Return the schedulers that count ranks, each with its state before a checkpoint is loaded.

    Args:
        wrappers: the AcceleratedSchedulers of an Accelerator; DeepSpeed's own have other attributes.
    """
    return [
        (wrapper.scheduler, dict(wrapper.state_dict()))
        for wrapper in wrappers
        if getattr(wrapper, "step_with_optimizer", False) and not wrapper.split_batches
    ]


def follow_ranks(schedulers: Iterable[tuple[Any, State]], *, saved: int, now: int, changes: Changes) -> None:
    """Make loaded schedulers count as many ranks as there are.

    A schedule is converted where its own length and the converted count give the learning rates that were
    saved. One that a script makes alike for any number of ranks goes on as it was saved.

    Args:
        schedulers: of own_states.
        saved: ranks that saved them.
        now: ranks that resume them.
    """
    for scheduler, own in schedulers if saved != now else ():
        loaded = dict(scheduler.state_dict())
        if not _is_converted(scheduler, own, loaded, saved=saved, now=now):
            scheduler.load_state_dict(loaded)
            changes.add(
                f"{type(scheduler).__name__} goes on as it was saved, and advances by {now} in a step, as "
                f"accelerate steps it, where it advanced by {saved}"
            )


def _is_converted(scheduler: Any, own: State, loaded: State, *, saved: int, now: int) -> bool:
    """Convert a scheduler's state and return True; False if that does not give the learning rates saved."""
    counted = counted_schedule(own, loaded, now / saved)
    if counted is None:
        return False
    scheduler.load_state_dict(counted)
    rates = scheduled_rates(scheduler)
    return rates is not None and all(
        math.isclose(rate, known, rel_tol=1e-6, abs_tol=1e-15)
        for rate, known in zip(rates, scheduler.get_last_lr(), strict=True)
    )
