"""Applies a strategy to the model and optimizer of a plain training loop, without accelerate."""

from __future__ import annotations

import os
from enum import Enum
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.strategy import Precision, Strategy
from zerofit.training.changes import Changes
from zerofit.training.setup.changed_model import changed
from zerofit.training.setup.optimizer_swap import is_alike, swap_and_note
from zerofit.training.setup.trained_groups import holds, match_trained_parameters

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

_LEFT_TO_THE_LOOP = {
    "engine": "DeepSpeed replaces backward() and step(), which the loop calls",
    "zero_stage": "DeepSpeed partitions, and replaces backward() and step(), which the loop calls",
    "optimizer_offload": "DeepSpeed offloads, and replaces backward() and step(), which the loop calls",
    "param_offload": "DeepSpeed offloads, and replaces backward() and step(), which the loop calls",
    "precision": "the loop must run its forward pass in torch.autocast",
    "micro_batch_size": "the loop makes its batches",
    "gradient_accumulation_steps": "the loop decides when the optimizer steps",
    "gradient_clipping": "the loop must clip gradients (torch.nn.utils.clip_grad_norm_)",
    "compile": "the loop must call torch.compile() on the returned model",
    "group_by_length": "the loop makes its batches",
}
"""Fields of Strategy that a plain loop handles itself, and why."""


def apply_strategy(
    strategy: Strategy, model: Module, optimizer: Optimizer | None = None
) -> tuple[Module, Optimizer | None]:
    """Apply a strategy to a model and its optimizer, for a training loop without accelerate.

    Freezes the model, and applies LoRA, attention implementation, Liger's kernels and gradient checkpointing,
    in place if possible. The optimizer's groups are reduced to trained parameters, and another kind of
    optimizer replaces it if requested. Changes are printed to stderr.

    Args:
        strategy: the strategy.
        model: on its device, or before it is moved there; not yet wrapped for several ranks, nor compiled.
        optimizer: of the model, before its first step; None if it is created from the returned model later.

    Returns:
        The model to train, and its optimizer, which the given optimizer's schedulers now set.

    Raises:
        UserError: the strategy has settings that a loop must handle itself, the model does not support it, or
            the optimizer is of another model, or must be replaced but has already made steps.
    """
    _check_possible(strategy, optimizer)
    if optimizer is not None:
        _check_optimizer(optimizer, model, strategy)
    changes = Changes(announce=os.environ.get("RANK", "0") == "0")
    if strategy.tf32 is not None:
        from zerofit.models.changes.kernels import set_tf32

        changes.add(*set_tf32(strategy.tf32))
    model, notes = changed(model, strategy, precision=None)
    changes.add(*notes)
    if optimizer is not None:
        match_trained_parameters(model, [optimizer])
        if strategy.optimizer is not None:
            optimizer = swap_and_note(
                optimizer, strategy.optimizer, changes, modules=model.modules(), said="the loop makes"
            )
    return model, optimizer


def _check_possible(strategy: Strategy, optimizer: Any) -> None:
    nothing = Strategy(precision=Precision.FP32)
    for field, why in _LEFT_TO_THE_LOOP.items():
        value = getattr(strategy, field)
        if value is None or value == getattr(nothing, field):
            continue
        raise UserError(
            "not-in-a-plain-loop",
            f"{field} can't be applied to a plain loop",
            found=f"Strategy({field}={_said(value)})",
            why=why,
            fix="use accelerate or a Trainer: zerofit.accelerator(), zerofit.trainer(), or `zerofit launch`",
        )
    if strategy.optimizer is not None and optimizer is None:
        raise UserError(
            "no-optimizer-given",
            "the new optimizer needs the parameter groups of the loop's optimizer",
            found=f"Strategy(optimizer={_said(strategy.optimizer)}) and no optimizer",
            why="learning rate and weight decay come from the loop's optimizer",
            fix="pass the loop's optimizer as the third argument",
        )


def _check_optimizer(optimizer: Optimizer, model: Module, strategy: Strategy) -> None:
    name, own = strategy.optimizer, type(optimizer).__name__
    if not holds(optimizer, model):
        raise UserError(
            "optimizer-of-another-model",
            "the optimizer holds no parameter of this model",
            found=f"{own}, and {type(model).__name__}, none of whose parameters are in its groups",
            why="its groups are updated to the model's trainable parameters",
            fix="create the optimizer from the model that is passed here",
        )
    if name is not None and optimizer.state and not is_alike(optimizer, name):
        raise UserError(
            "optimizer-has-stepped",
            "the loop's optimizer has already made steps",
            found=f"{own} with states, and Strategy(optimizer={_said(name)})",
            why="another optimizer can't use its states, which would be lost",
            fix="call apply_strategy() before the first step, and before the optimizer loads a checkpoint",
        )


def _said(value: Any) -> str:
    return f"{type(value).__name__}.{value.name}" if isinstance(value, Enum) else str(value)
