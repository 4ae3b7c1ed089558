"""What of a strategy is done to a rung's model and optimizer; the rest is the loop's, or DeepSpeed's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zerofit.core.strategy import Engine, OffloadDevice, OptimizerName, ZeroStage

if TYPE_CHECKING:
    from zerofit.core.strategy import Strategy

_LEARNING_RATE = 1e-4
"""ASSUMPTION: low enough for a model with random weights, and high enough that three steps show."""


def apply_to_model(strategy: Strategy, model: Any) -> tuple[Any, Any]:
    """Return a model as a strategy has it, and the optimizer of what trains of it.

    Raises:
        UserError: the model can't take the strategy.
    """
    from zerofit.training.apply_strategy import apply_strategy

    made: tuple[Any, Any] = apply_strategy(_for_model(strategy), model, _own_optimizer(model, strategy))
    return made


def _for_model(strategy: Strategy) -> Strategy:
    return replace(
        strategy,
        engine=Engine.NATIVE,
        zero_stage=ZeroStage.NOTHING,
        optimizer_offload=OffloadDevice.NONE,
        param_offload=OffloadDevice.NONE,
        precision=None,
        micro_batch_size=None,
        gradient_accumulation_steps=None,
        gradient_clipping=None,
        compile=False,
    )


def _own_optimizer(model: Any, strategy: Strategy) -> Any:
    """Return the AdamW that a script would make: foreach, or fused where the strategy names torch's AdamW."""
    import torch

    fused = strategy.optimizer is OptimizerName.ADAMW
    how: dict[str, bool] = {"fused": True} if fused else {"foreach": True}
    return torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, **how)
