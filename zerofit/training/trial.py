"""A trial of `zerofit tune` in a rank: its steps are timed, nothing of the user's changes, all ranks end."""

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
from zerofit.training import observe
from zerofit.training.wrapping import wrap

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerofit.core.plan import TrialSteps
    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings


class _Clock:
    """When each step was done."""

    def __init__(self, steps: TrialSteps, leave: Callable[[], None]) -> None:
        self._steps = steps
        self._leave = leave
        self._done_at: list[float] = []

    def note_step(self) -> None:
        """Note that a step is done; after the last, end this rank together with all others."""
        torch = sys.modules["torch"]
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._done_at.append(time.perf_counter())
        if len(self._done_at) == self._steps.num_warm_up + self._steps.num_timed:
            if torch.distributed.is_initialized():
                torch.distributed.barrier()  # no rank goes while another still talks to it
            for worker in multiprocessing.active_children():  # a DataLoader's
                worker.terminate()
            self._leave()

    def has_not_begun(self) -> bool:
        """True before the first step."""
        return not self._done_at

    @property
    def step_time_s(self) -> float | None:
        """The median of the timed steps; None before the first."""
        timed = self._done_at[self._steps.num_warm_up - 1 :]
        times = [end - begin for begin, end in itertools.pairwise(timed)]
        return statistics.median(times) if times else None


_clock: _Clock | None = None
"""None where the run is no trial."""


def start(steps: TrialSteps, leave: Callable[[], None]) -> None:
    """Keep what the script does to itself, and time its steps; after all hooks of the plan are set.

    From its first step on it saves no weights, it resumes from no checkpoint, trackers and the hub hear
    nothing, and what the script is about to change on disk is noted first, so that it can be put back.

    Args:
        steps: how many.
        leave: ends this process at once, with exit code 0.
    """
    global _clock
    _clock = _Clock(steps, leave)
    observe.call_after_steps(_clock.note_step)
    quiet_saving.install(lambda: None, may_save=_clock.has_not_begun)  # it may read back what it prepares
    quiet_hub.install()
    quiet_trackers.install()
    guard(Path(steps.guard))


def step_time_s() -> float | None:
    """Return the median time of a step of this trial; None where none was timed."""
    return None if _clock is None else _clock.step_time_s


def install_in_callbacks(module: Any, settings: AppliedSettings, changes: Changes) -> None:
    """Have a Trainer neither save nor evaluate in a trial.

    Args:
        module: transformers.trainer_callback.
    """
    if settings.plan.trial is None:
        return

    def only_train(original: Any, *args: Any, **kwargs: Any) -> Any:
        control = original(*args, **kwargs)
        control.should_save = control.should_evaluate = False
        return control

    for name in ("on_step_end", "on_epoch_end"):
        wrap(module.CallbackHandler, name, only_train)
