"""A trial of `zerofit tune` in a rank: steps are timed, the user's files don't change, all ranks end."""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.scripts.capture.child import quiet_hub, quiet_saving, quiet_trackers
from zerofit.scripts.capture.child.files import guard
from zerofit.training.reporting import observe

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerofit.core.plan import TrialSteps
    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper


class _Clock:
    """The times of steps."""

    def __init__(self, steps: TrialSteps, leave: Callable[[], None]) -> None:
        self._steps = steps
        self._leave = leave
        self._done_at: list[float] = []

    def note_step(self) -> None:
        """Record a step; after the last, end this rank together with all others."""
        torch = sys.modules["torch"]
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._done_at.append(time.perf_counter())
        if len(self._done_at) == self._steps.num_warm_up + self._steps.num_timed:
            if torch.distributed.is_initialized():
                torch.distributed.barrier()  # no rank exits while another still communicates with it
            for worker in multiprocessing.active_children():  # a DataLoader's
                worker.terminate()
            self._leave()

    def has_not_begun(self) -> bool:
        """Return True before the first step."""
        return not self._done_at

    @property
    def step_time_s(self) -> float | None:
        """Return the median of the timed steps; None before the first."""
        timed = self._done_at[self._steps.num_warm_up - 1 :]
        times = [end - begin for begin, end in itertools.pairwise(timed)]
        return statistics.median(times) if times else None


_clock: _Clock | None = None
"""None if the run is no trial."""


def start(steps: TrialSteps, leave: Callable[[], None]) -> None:
    """Suppress the script's side effects, and time its steps; to be called after installing all hooks.

    From its first step on it saves no weights, resumes from no checkpoint, trackers and the hub receive
    nothing, and changes on disk are recorded first, so that they can be undone.

    Args:
        steps: how many.
        leave: ends this process at once, with exit code 0.
    """
    global _clock
    _clock = _Clock(steps, leave)
    observe.call_after_steps(_clock.note_step)
    quiet_saving.install(lambda: None, may_save=_clock.has_not_begun)  # it may read back prepared data
    quiet_hub.install()
    quiet_trackers.install()
    guard(Path(steps.guard))


def step_time_s() -> float | None:
    """Return the median step time of this trial; None if no step was timed."""
    return None if _clock is None else _clock.step_time_s


def callback_wrappers(handler_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Keep a Trainer from saving and evaluating in a trial."""
    if settings.plan.trial is None:
        return {}

    def only_train(original: Any, *args: Any, **kwargs: Any) -> Any:
        control = original(*args, **kwargs)
        control.should_save = control.should_evaluate = False
        return control

    return {"on_step_end": only_train, "on_epoch_end": only_train}
