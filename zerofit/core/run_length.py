"""RunLength: the optimizer steps of a planned run, and what they follow from."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.core.command import Route

if TYPE_CHECKING:
    from zerofit.core.capture import Capture
    from zerofit.core.plan import Plan

_STEPS_OPTION = re.compile(r"--(?:max|num|n|total)?[-_]?(?:train|training|update|optimizer)?[-_]?steps")
"""Options of scripts for their optimizer steps: transformers' --max_steps, accelerate's --max_train_steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLength:
    """The optimizer steps of a run on the ranks and with the global batch of its plan."""

    num_steps: int | None
    """Steps that are left; None if unknown."""
    source: str
    """What says it: "--max_steps 100", "num_train_epochs", "train.py:40"; if unknown, why."""
    num_samples: int | None = None
    """Samples of an epoch; None if the steps do not depend on them."""
    num_epochs: float | None = None
    global_batch_size: int | None = None
    """Samples of a step, over all ranks."""
    steps_per_epoch: int | None = None
    drops_last: bool = False
    """True if the last samples of an epoch, fewer than a batch, are left out."""
    steps_done: int = 0
    """Steps of the checkpoint that the run resumes from, not included in num_steps."""
    micro_batches: int = 1
    """Batches of a step, each of which the plan takes for a step."""

    def __str__(self) -> str:
        if self.num_steps is None:
            return f"the number of steps is unknown: {self.source}"
        words = f"{self.num_steps} steps"
        if self.micro_batches > 1:
            words += f" of {self.micro_batches} batches each"
        if self.steps_per_epoch is None:
            words += f" ({self.source})"
        else:
            each = f"{self.steps_per_epoch} steps per epoch"
            if self.num_samples is not None and self.global_batch_size is not None:
                dropped = ", without the last" if self.drops_last else ""
                each = f"{self.num_samples} samples / {self.global_batch_size} per step{dropped} = {each}"
            words += f": {each}, {self.num_epochs:g} epoch{'s' * (self.num_epochs != 1)} ({self.source})"
        return f"{words}, after the {self.steps_done} of its checkpoint" if self.steps_done else words


def run_length(plan: Plan, target: tuple[str, ...]) -> RunLength:
    """Return the steps of a planned run.

    Args:
        plan: of the run, with its capture if the script was captured.
        target: the script and its arguments, which are read if it was not.
    """
    capture = plan.capture
    if capture is None:
        steps, option = _typed_steps(target)
        why = "the script was not run here, and none of its arguments sets it"
        return RunLength(num_steps=steps, source=why if steps is None else f"{option} {steps}")
    data_parallel_size = plan.topology.data_parallel_size
    size = _global_batch_size(plan, data_parallel_size)
    each = _steps_per_epoch(capture, data_parallel_size, size)
    length = _of_trainer(capture, each) if capture.route is Route.TRAINER else _of_loop(capture, each, target)
    if length.num_epochs is None or length.steps_per_epoch is None or capture.loader is None:
        return length
    return RunLength(
        num_steps=length.num_steps,
        source=length.source,
        num_samples=capture.loader.num_samples,
        num_epochs=length.num_epochs,
        global_batch_size=size,
        steps_per_epoch=length.steps_per_epoch,
        drops_last=capture.loader.drops_last,
        steps_done=length.steps_done,
    )


def _global_batch_size(plan: Plan, data_parallel_size: int) -> int | None:
    strategy = plan.strategy
    if strategy.micro_batch_size is not None and strategy.gradient_accumulation_steps is not None:
        return strategy.micro_batch_size * strategy.gradient_accumulation_steps * data_parallel_size
    return None if plan.capture is None else plan.capture.global_batch_size(data_parallel_size)


def _steps_per_epoch(capture: Capture, data_parallel_size: int, size: int | None) -> int | None:
    """Return the optimizer steps of an epoch, on ranks that share the batches as accelerate deals them out.

    Source: accelerate/data_loader.py, BatchSamplerShard.__len__; transformers/trainer.py,
    set_initial_training_values, which counts a last, incomplete window as a step, as accelerate does.
    """
    loader = capture.loader
    if loader is None or loader.num_batches is None:
        return None
    divide = _floor if loader.drops_last else _ceil
    own = capture.global_batch_size(data_parallel_size)
    if size is not None and own not in (None, size) and loader.num_samples is not None:
        return max(1, divide(loader.num_samples, size))
    ranks = 1 if capture.splits_batches else data_parallel_size
    return max(1, _ceil(divide(loader.num_batches, ranks), capture.passes_per_step))


def _ceil(number: int, divisor: int) -> int:
    return math.ceil(number / divisor)


def _floor(number: int, divisor: int) -> int:
    return number // divisor


def _of_trainer(capture: Capture, each: int | None) -> RunLength:
    arguments, done = capture.trainer_arguments, capture.steps_done
    if (most := int(arguments.get("max_steps") or 0)) > 0:
        return RunLength(num_steps=max(0, most - done), source=f"max_steps={most}", steps_done=done)
    epochs = float(arguments.get("num_train_epochs") or 0)
    if each is None:
        return RunLength(num_steps=None, source="its data has no length, and it sets no max_steps")
    return RunLength(
        num_steps=max(0, math.ceil(epochs * each) - done),
        source=f"num_train_epochs={epochs:g}",
        num_epochs=epochs,
        steps_per_epoch=each,
        steps_done=done,
    )


def _of_loop(capture: Capture, each: int | None, target: tuple[str, ...]) -> RunLength:
    loop = capture.loop
    if loop is None:
        return _of_schedule(capture, each)
    epochs, most, source = loop.num_epochs, loop.max_steps, loop.where
    if most is not None:
        in_data = _epochs_in(capture, most, epochs)
        if in_data is None or not loop.max_steps_follow_data or _is_typed(most, target):
            if epochs is None or each is None or loop.epochs_follow_steps or epochs * each >= most:
                return RunLength(num_steps=most, source=source, micro_batches=loop.micro_batches)
        else:
            epochs = in_data
    if epochs is None:
        return _of_schedule(capture, each)
    if each is None:
        return RunLength(num_steps=None, source=f"its data has no length, and {source} sets no limit")
    return RunLength(num_steps=epochs * each, source=source, num_epochs=epochs, steps_per_epoch=each)


def _of_schedule(capture: Capture, each: int | None) -> RunLength:
    """Return the steps for which the script made its learning-rate schedule, in one process."""
    found = [schedule.num_steps for schedule in capture.schedulers if schedule.num_steps]
    unknown = RunLength(num_steps=None, source="the script's source does not show for how long it trains")
    if not found:
        return unknown
    most, source = max(found), "assumed from its learning-rate schedule"
    if capture.loader is None or capture.loader.num_batches is None:
        return RunLength(num_steps=most, source=source)
    if (epochs := _epochs_in(capture, most, None)) is not None and each is not None:
        return RunLength(num_steps=epochs * each, source=source, num_epochs=epochs, steps_per_epoch=each)
    alone = _steps_per_epoch(capture, 1, None)
    # A schedule that is shorter than an epoch may count epochs.
    return unknown if alone is None or most < alone else RunLength(num_steps=most, source=source)


def _epochs_in(capture: Capture, num_steps: int, epochs: int | None) -> int | None:
    """Return how many epochs of one process a number of steps is; None if no whole number of them.

    Args:
        capture: of the script.
        num_steps: optimizer steps.
        epochs: the only number that may be returned; None for any.
    """
    if capture.loader is None or not capture.loader.num_batches:
        return None
    batches, passes = capture.loader.num_batches, capture.passes_per_step
    for each in (_ceil(batches, passes), _floor(batches, passes)):  # scripts round either way
        if each and num_steps % each == 0 and epochs in (None, num_steps // each):
            return num_steps // each
    return None


def _is_typed(number: int, target: tuple[str, ...]) -> bool:
    """Return True if an option of the script for its steps has this value."""
    return _typed_steps(target)[0] == number


def _typed_steps(target: tuple[str, ...]) -> tuple[int | None, str]:
    """Return the optimizer steps that a script's arguments set, and their option."""
    found: tuple[int | None, str] = (None, "")
    for place, word in enumerate(target):
        option, joint, value = word.partition("=")
        if not joint:
            value = target[place + 1] if place + 1 < len(target) else ""
        if _STEPS_OPTION.fullmatch(option) and value.isdecimal() and int(value) > 0:
            found = int(value), option
    return found
