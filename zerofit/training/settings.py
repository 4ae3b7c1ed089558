"""The parts of a plan that affect an unmodified script."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

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
    def uses_fsdp2(self) -> bool:
        """True if FSDP2 shards the model."""
        return self.strategy.engine is Engine.FSDP2

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
        if is_own and self.global_batch_size is None and not self.plan.is_set_by_user("micro_batch_size"):
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
