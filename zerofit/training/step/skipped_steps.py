"""Counts the optimizer steps skipped by fp16's loss scaling, and warns if they are too many."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import format_message
from zerofit.core.upstream.deepspeed import after_each_step
from zerofit.training.wrapping import around_steps

if TYPE_CHECKING:
    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper

TOO_MANY_IN_A_ROW = 17
"""Each skipped step halves the scale, which starts at 2**16 (torch/amp/grad_scaler.py, init_scale;
deepspeed/runtime/fp16/loss_scaler.py): after 16 in a row it is 1, and can't cause the overflow."""
LARGE_SHARE = 0.1
"""Maximum share of skipped steps after the first successful one. The scale doubles after 2000 good steps in
torch, 1000 in DeepSpeed, and one step may be skipped each time. ASSUMPTION: a hundred times as many are not
due to the search for a scale."""
FEWEST_STEPS = 50
"""Minimum number of steps after the first successful one before their share is checked. ASSUMPTION."""
SEE = "https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling"


class SkippedSteps:
    """Number of optimizer steps, and of those that a loss scaler skipped."""

    def __init__(self) -> None:
        self.num_steps = 0
        """Calls of step() by the script, including skipped steps."""
        self.num_skipped = 0
        self._in_a_row = 0
        self._warm_up: int | None = None
        self._noted: set[str] = set()

    def count(self, *, skipped: bool, changes: Changes) -> None:
        """Count one step, and warn if too many were skipped because gradients overflowed."""
        self.num_steps += 1
        self.num_skipped += skipped
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if self._warm_up is None and not skipped:
            self._warm_up = self.num_skipped
        if self._in_a_row == TOO_MANY_IN_A_ROW:
            self._warn("row", f"the last {self._in_a_row} steps, of {self.num_steps} so far", changes)
        if self._warm_up is None:
            return
        since, skipped_since = self.num_steps - self._warm_up, self.num_skipped - self._warm_up
        if since >= FEWEST_STEPS and skipped_since > LARGE_SHARE * since:
            self._warn("share", f"{skipped_since} of the last {since} steps", changes)

    def _warn(self, about: str, found: str, changes: Changes) -> None:
        if about in self._noted:
            return
        self._noted.add(about)
        text = format_message(
            "warning[fp16-skips-steps]: fp16's loss scaling skips many optimizer steps",
            found=found,
            why="their gradients overflow (inf or NaN) at any scale, and a skipped step trains nothing",
            fix="train in bf16 where the GPU has it (--mixed-precision bf16), with a smaller learning rate, "
            "or with --gradient-clipping 1",
            see=SEE,
        )
        changes.warn(text)


@cache
def of_this_process() -> SkippedSteps:
    """Return this process's counter, which its record includes."""
    return SkippedSteps()


def wrappers(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Count the steps of accelerate's loss scaler."""

    def step(self: Any, optimizer: Any, original: Any, closure: Any = None) -> Any:
        result = original(closure)
        if self.sync_gradients:
            of_this_process().count(skipped=optimizer.step_was_skipped, changes=changes)
        return result

    def has_scaler(_: Any, optimizer: Any) -> bool:
        return getattr(optimizer, "scaler", None) is not None

    return {"prepare_optimizer": around_steps("_zerofit_counts", step, only=has_scaler)}


def watch_engine(engine: Any, changes: Changes) -> None:
    """Count the steps of a DeepSpeedEngine with loss scaling."""
    if engine.fp16_enabled():
        after_each_step(engine, lambda skipped: of_this_process().count(skipped=skipped, changes=changes))
