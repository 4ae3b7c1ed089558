"""What of a plan reaches an unmodified script."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.errors import UserError
from zerofit.strategy import Engine

if TYPE_CHECKING:
    from zerofit.capture import Capture
    from zerofit.plan import Plan
    from zerofit.strategy import OptimizerName, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that the hooks set; None leaves the script's own."""

    uses_deepspeed: bool
    """Whether the plan brings a DeepSpeed configuration."""
    on_cpu: bool
    """Whether the ranks run on the CPU."""
    micro_batch_size: int | None
    """Samples that go through one forward pass on one rank."""
    global_batch_size: int | None
    """Samples of one optimizer step over all ranks, where they were asked for."""
    trainer_accumulates: bool
    """Whether a Trainer makes its micro-batches itself, by its DataLoader and its accumulation; else its
    forward pass is split, as that of other scripts is."""
    precision: Precision | None
    """Format of forward and backward."""
    precision_is_default: bool
    """Whether the precision gives way to one that the script names itself."""
    gradient_accumulation_steps: int | None
    """Forward passes per rank in one optimizer step."""
    gradient_clipping: float | None
    """Largest norm of all gradients together; 0 turns clipping off."""
    gradient_checkpointing: bool | None
    """Whether activations are recomputed in the backward pass."""
    optimizer: OptimizerName | None
    """What takes the place of the script's optimizer."""


def settings_of(plan: Plan, capture: Capture | None = None) -> Settings:
    """Return what of the plan reaches the script.

    Args:
        plan: what runs.
        capture: what the script trains; None where it was not captured.
    """
    return Settings(
        uses_deepspeed=plan.strategy.engine is Engine.DEEPSPEED,
        on_cpu=plan.topology.on_cpu,
        micro_batch_size=plan.strategy.micro_batch_size,
        global_batch_size=plan.workload.global_batch_size,
        trainer_accumulates=capture is not None and trainer_accumulates(capture),
        precision=plan.strategy.precision,
        precision_is_default=plan.is_default("precision"),
        gradient_accumulation_steps=plan.strategy.gradient_accumulation_steps,
        gradient_clipping=plan.strategy.gradient_clipping,
        gradient_checkpointing=plan.strategy.gradient_checkpointing,
        optimizer=plan.strategy.optimizer,
    )


def trainer_accumulates(capture: Capture) -> bool:
    """Return whether a Trainer computes the same from smaller batches and more accumulation.

    It does where the loss of the whole window is divided by its number of items, where a batch's collation
    draws no random numbers, and where its loop is transformers' own.
    """
    collator = capture.loader.collator if capture.loader is not None else ""
    return (
        capture.model.passes_num_items and not capture.trainer_overrides and collator not in _RANDOM_COLLATORS
    )


_RANDOM_COLLATORS = frozenset(
    {
        "DataCollatorForLanguageModeling",
        "DataCollatorForWholeWordMask",
        "DataCollatorForSOP",
        "DataCollatorForPermutationLanguageModeling",
    }
)
"""Collators of transformers that mask at random (transformers/data/data_collator.py); the first does so only
for masked language models, and splitting is right for all."""


def check_micro_batch(settings: Settings, script_says: int | None) -> None:
    """Check that the script's micro-batch makes the global batch that was asked for.

    Args:
        settings: what the plan says.
        script_says: samples per rank in one forward pass; None where the script does not tell.

    Raises:
        UserError: it does not.
    """
    if settings.global_batch_size is None or None in (settings.micro_batch_size, script_says):
        return
    if settings.micro_batch_size == script_says:
        return
    raise UserError(
        "micro-batch-differs",
        "the script's micro-batch does not make the global batch that was asked for",
        found=f"{script_says} samples on each rank, and --micro-batch-size {settings.micro_batch_size}",
        why="accumulation was computed with --micro-batch-size, and zerofit never changes a global batch",
        fix=f"give --micro-batch-size {script_says}, or the script its own batch-size argument",
    )


_UNAPPLIED = {
    "micro_batch_size": "give the script its own batch-size argument",
    "gradient_checkpointing": "switch it on or off in the script",
    "optimizer": "choose it in the script",
    "attention": "pass attn_implementation to from_pretrained in the script",
    "freeze": "freeze in the script",
    "lora": "wrap the model with peft in the script",
}
"""Fields of Strategy that do not reach an unmodified script, and what the user does instead."""


def unapplied(plan: Plan) -> tuple[str, ...]:
    """Return one sentence for each field of the plan that the launched script will not follow by itself."""
    return tuple(
        f"{field}={value} is not applied to the script: {instead}"
        for field, instead in _UNAPPLIED.items()
        if (value := getattr(plan.strategy, field)) not in (None, ())
    )
