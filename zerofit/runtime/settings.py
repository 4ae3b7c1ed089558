"""What of a plan reaches an unmodified script."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.errors import UserError
from zerofit.strategy import Engine

if TYPE_CHECKING:
    from zerofit.plan import Plan
    from zerofit.strategy import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that the hooks set; None leaves the script's own."""

    uses_deepspeed: bool
    """Whether the plan brings a DeepSpeed configuration."""
    on_cpu: bool
    """Whether the ranks run on the CPU."""
    micro_batch_size: int | None
    """What the script's micro-batch must be, for the global batch to be what was asked for."""
    precision: Precision | None
    """Format of forward and backward."""
    precision_is_default: bool
    """Whether the precision gives way to one that the script names itself."""
    gradient_accumulation_steps: int | None
    """Forward passes per rank in one optimizer step."""
    gradient_clipping: float | None
    """Largest norm of all gradients together; 0 turns clipping off."""


def settings_of(plan: Plan) -> Settings:
    """Return what of the plan reaches the script."""
    asked_for = plan.workload.global_batch_size
    return Settings(
        uses_deepspeed=plan.strategy.engine is Engine.DEEPSPEED,
        on_cpu=plan.topology.on_cpu,
        micro_batch_size=plan.strategy.micro_batch_size if asked_for is not None else None,
        precision=plan.strategy.precision,
        precision_is_default=plan.is_default("precision"),
        gradient_accumulation_steps=plan.strategy.gradient_accumulation_steps,
        gradient_clipping=plan.strategy.gradient_clipping,
    )


def check_micro_batch(settings: Settings, script_says: int | None) -> None:
    """Check that the script's micro-batch makes the global batch that was asked for.

    Args:
        settings: what the plan says.
        script_says: samples per rank in one forward pass; None where the script does not tell.

    Raises:
        UserError: it does not.
    """
    if None in (settings.micro_batch_size, script_says) or settings.micro_batch_size == script_says:
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
