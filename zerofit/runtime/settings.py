"""What of a plan reaches an unmodified script."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.plan import Origin

if TYPE_CHECKING:
    from zerofit.plan import Plan
    from zerofit.strategy import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that the hooks set; None leaves the script's own."""

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
    return Settings(
        precision=plan.strategy.precision,
        precision_is_default=any(
            reason.field == "precision" and reason.origin is Origin.DEFAULT for reason in plan.reasons
        ),
        gradient_accumulation_steps=plan.strategy.gradient_accumulation_steps,
        gradient_clipping=plan.strategy.gradient_clipping,
    )


_UNAPPLIED = {
    "micro_batch_size": "give the script its own batch-size argument",
    "gradient_checkpointing": "switch it on or off in the script",
    "optimizer": "choose it in the script",
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
