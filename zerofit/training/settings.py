"""The parts of a plan that affect an unmodified script, and batch sizes that both must agree on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zerofit.core.errors import UserError
from zerofit.core.strategy import Engine

if TYPE_CHECKING:
    from pathlib import Path

    from zerofit.core.capture import CapturedModel
    from zerofit.core.plan import Plan
    from zerofit.core.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedSettings:
    """The settings that hooks apply."""

    plan: Plan
    strategy: Strategy
    """The plan's; None keeps the script's own value. Its accumulation is the value for the script, without
    the passes that a loop counts itself."""
    global_batch_size: int | None
    """Samples per optimizer step over all ranks, if requested."""
    trainer_accumulates: bool
    """True if a Trainer makes its micro-batches itself, by its DataLoader and accumulation; else its forward
    pass is split, as for other scripts."""
    run_folder: Path | None = None
    """The run folder; None if zerofit is called from a script."""

    @property
    def uses_deepspeed(self) -> bool:
        """True if the plan has a DeepSpeed configuration."""
        return self.strategy.engine is Engine.DEEPSPEED

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks that share the layers of one copy of the model, and its samples."""
        return self.plan.topology.tensor_parallel_size if self.uses_deepspeed else 1

    @property
    def sequence_parallel_size(self) -> int:
        """Ranks that share the tokens of the same samples."""
        return self.plan.topology.sequence_parallel_size if self.uses_deepspeed else 1

    @property
    def sample_group_size(self) -> int:
        """Ranks that get the same samples."""
        return self.plan.topology.sample_group_size if self.uses_deepspeed else self.pipeline_parallel_size

    @property
    def pipeline_parallel_size(self) -> int:
        """Ranks that each hold a part of the blocks of a copy of the model; PyTorch alone runs them."""
        return 1 if self.uses_deepspeed else self.plan.topology.pipeline_parallel_size

    @property
    def on_cpu(self) -> bool:
        """True if the ranks run on the CPU."""
        return self.plan.topology.on_cpu

    @property
    def precision_is_default(self) -> bool:
        """True if the script's own precision takes precedence."""
        return self.plan.is_default("precision")

    @property
    def most_rows(self) -> int | None:
        """Maximum rows of a model's batch in one forward pass; None keeps the script's batches whole."""
        size, capture = self.strategy.micro_batch_size, self.plan.capture
        if size is None or capture is None:
            return size
        ranks = self.plan.topology.data_parallel_size
        if self.pipeline_parallel_size > 1:  # whose passes are always split
            return size * capture.rows_per_sample
        is_own = size * capture.passes_per_step * ranks == capture.global_batch_size(ranks)
        if is_own and self.global_batch_size is None and not self.plan.is_from_flag("micro_batch_size"):
            return None
        return size * capture.rows_per_sample

    @property
    def captured_model(self) -> CapturedModel | None:
        """The model that the script was about to train; None if it was not captured."""
        return self.plan.capture.model if self.plan.capture is not None else None

    @property
    def forced_accumulation(self) -> int | None:
        """The accumulation that replaces an accelerate script's own.

        With a micro-batch size the number counts pieces of the script's batches, and its own loop is
        kept.
        """
        return self.strategy.gradient_accumulation_steps if self.strategy.micro_batch_size is None else None


def settings_of(plan: Plan, *, run_folder: Path | None = None) -> AppliedSettings:
    """Return the parts of the plan that affect the script."""
    capture = plan.capture
    ranks = plan.topology.data_parallel_size
    asked_for = plan.workload.global_batch_size
    own = capture.global_batch_size(ranks) if capture is not None else None
    steps = plan.strategy.gradient_accumulation_steps
    in_loop = (capture.accumulates_by_hand if capture is not None else None) or 1
    return AppliedSettings(
        plan=plan,
        strategy=replace(plan.strategy, gradient_accumulation_steps=steps and steps // in_loop),
        # Not checked if the script derives it itself, possibly from the number of ranks.
        global_batch_size=None if asked_for == own else asked_for,
        trainer_accumulates=capture is not None and capture.trainer_accumulates(ranks),
        run_folder=run_folder,
    )


def check_batch(
    settings: AppliedSettings, *, batch_size: int | None, accumulation: int, num_ranks: int
) -> None:
    """Check that the script's own numbers give the batch size of the plan.

    Args:
        settings: the plan's.
        batch_size: samples per rank in one forward pass of the script; None if unknown.
        accumulation: the script's forward passes per rank in one optimizer step.
        num_ranks: ranks with different samples.
    """
    if batch_size is None:
        return
    _check_global_batch(settings, batch_size=batch_size, accumulation=accumulation, num_ranks=num_ranks)
    micro_batch_size = settings.strategy.micro_batch_size
    if micro_batch_size is None:
        return
    if micro_batch_size > batch_size:
        raise micro_batch_too_large(
            settings,
            batch_size,
            why="zerofit splits the script's batches, and can't merge several of them",
        )
    pieces = -(-batch_size // micro_batch_size) * accumulation
    asked = settings.strategy.gradient_accumulation_steps
    if asked is not None and asked not in (pieces, accumulation * batch_size / micro_batch_size):
        raise UserError(
            "accumulation-differs-from-script",
            "these micro-batches don't add up to the script's step",
            found=f"micro-batches of {micro_batch_size}, accumulated {asked} times, and "
            f"{_times(batch_size, accumulation)} samples on each rank in a step of the script",
            why=f"with this size, a step of the script has {pieces} micro-batches, and zerofit never changes "
            "a global batch size by itself",
            fix="give --micro-batch-size and --gradient-accumulation-steps whose product is "
            f"{batch_size * accumulation}, or --micro-batch-size alone",
        )


def _check_global_batch(
    settings: AppliedSettings, *, batch_size: int, accumulation: int, num_ranks: int
) -> None:
    asked = settings.global_batch_size
    own = batch_size * accumulation * num_ranks
    if asked in (None, own):
        return
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    raise UserError(
        "global-batch-differs",
        "the script does not have the requested global batch size",
        found=f"global batch {asked}, and {_times(batch_size, accumulation)} samples on each of "
        f"{ranks} in the script, which makes {own}",
        why="zerofit splits the script's batches, and never changes a global batch by itself",
        fix=_batch_fix(asked, batch_size=batch_size, accumulation=accumulation, num_ranks=num_ranks),
    )


def _batch_fix(asked: int | None, *, batch_size: int, accumulation: int, num_ranks: int) -> str:
    """Return which of the script's numbers would give the requested global batch."""
    ways = [f"a global batch of {batch_size * accumulation * num_ranks}"]
    size, rest = divmod(asked or 0, accumulation * num_ranks)
    if size and not rest:
        ways.append(f"a batch size of {size} in the script")
    steps, rest = divmod(asked or 0, batch_size * num_ranks)
    if steps and not rest:
        ways.append(f"an accumulation of {steps} in the script")
    return f"take {', or '.join(ways)}"


def _times(batch_size: int, accumulation: int) -> str:
    return str(batch_size) if accumulation == 1 else f"{batch_size} x {accumulation}"


def micro_batch_too_large(settings: AppliedSettings, batch_size: int, *, why: str) -> UserError:
    """Return the error for a micro-batch that is larger than the script's batch."""
    micro_batch_size = settings.strategy.micro_batch_size
    if settings.plan.is_from_flag("micro_batch_size"):
        found = f"--micro-batch-size {micro_batch_size}"
        fix = f"set --micro-batch-size to {batch_size} or less"
    else:
        found = f"micro-batches of {micro_batch_size} in the plan"
        fix = "plan again with the script as it is now"
    return UserError(
        "micro-batch-too-large",
        "a micro-batch is a part of the script's batch",
        found=f"{batch_size} samples on each rank, and {found}",
        why=why,
        fix=f"{fix}, or give the script a larger batch size",
    )
