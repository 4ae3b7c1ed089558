"""The batches of a Trainer under a plan: samples of one forward pass, and forward passes of one step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zerofit.core.errors import UserError
from zerofit.training.settings import micro_batch_too_large

if TYPE_CHECKING:
    from zerofit.training.settings import AppliedSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """The samples of one optimizer step on one rank."""

    batch_size: int
    """Samples of one batch of its DataLoader."""
    gradient_accumulation_steps: int
    """Batches in one optimizer step."""

    @property
    def samples_per_step(self) -> int:
        """Samples of one optimizer step on one rank."""
        return self.batch_size * self.gradient_accumulation_steps


def batches_under(settings: AppliedSettings, script: Batches, *, world_size: int) -> Batches:
    """Return the batches that Trainer is to make.

    The samples of one optimizer step stay what the script says, unless the user asked for another number. The
    forward pass of a batch that is larger than the micro-batch is split later on.
    """
    wanted = settings.strategy
    micro_batch_size, steps = wanted.micro_batch_size, wanted.gradient_accumulation_steps
    if micro_batch_size is None:
        return replace(script, gradient_accumulation_steps=steps or script.gradient_accumulation_steps)
    asked = settings.global_batch_size
    if asked is not None and asked % world_size:
        raise _not_divisible(asked, world_size)
    samples = script.samples_per_step if asked is None else asked // world_size
    if settings.trainer_accumulates:
        if micro_batch_size * (steps or samples // micro_batch_size) != samples:
            raise _differs(settings, script, world_size)
        return Batches(batch_size=micro_batch_size, gradient_accumulation_steps=samples // micro_batch_size)
    if samples != script.samples_per_step:
        return _batches_of(samples, script, micro_batch_size)
    if micro_batch_size > script.batch_size:
        raise micro_batch_too_large(
            settings,
            script.batch_size,
            why="several of the script's batches, put together, would be padded and masked in another way",
        )
    pieces = -(-script.batch_size // micro_batch_size) * script.gradient_accumulation_steps
    if steps not in (None, pieces) and steps * micro_batch_size != samples:
        raise _differs(settings, script, world_size)
    return script


def _batches_of(samples: int, script: Batches, micro_batch_size: int) -> Batches:
    """Return batches for so many samples, accumulated as often as the script does where that divides them."""
    if micro_batch_size == script.batch_size and samples % micro_batch_size == 0:
        return replace(script, gradient_accumulation_steps=samples // micro_batch_size)
    steps = script.gradient_accumulation_steps
    if samples % steps:
        steps = 1
    return Batches(batch_size=samples // steps, gradient_accumulation_steps=steps)


def _not_divisible(asked: int, world_size: int) -> UserError:
    below = asked // world_size * world_size
    nearest = " or ".join(str(size) for size in (below, below + world_size) if size)
    return UserError(
        "global-batch-not-divisible",
        "the global batch does not divide over the ranks",
        found=f"a global batch of {asked}, and {world_size} ranks",
        why="each rank takes the same number of samples in each optimizer step",
        fix=f"ask for a global batch of {nearest}",
    )


def _differs(settings: AppliedSettings, script: Batches, world_size: int) -> UserError:
    steps = settings.strategy.gradient_accumulation_steps
    planned = f"{settings.strategy.micro_batch_size} samples" + (
        f" x {steps} forward passes" if steps else ""
    )
    return UserError(
        "micro-batch-differs",
        "the plan's micro-batches do not make the script's global batch",
        found=f"{planned} on each of {world_size} ranks in the plan, and {_words(script)} in the script",
        why="zerofit never changes a global batch by itself",
        fix="plan again, with --global-batch-size if another number than the script's is meant",
    )


def _words(script: Batches) -> str:
    return f"{script.batch_size} x {script.gradient_accumulation_steps}"
