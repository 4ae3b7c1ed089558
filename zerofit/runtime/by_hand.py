"""Applies a strategy to the model and the optimizer of a plain training loop, without accelerate."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from zerofit.errors import UserError
from zerofit.runtime.changed_model import changed
from zerofit.runtime.changes import Changes
from zerofit.runtime.optimizer_swap import swap
from zerofit.runtime.trained_groups import hold_what_trains
from zerofit.strategy import Engine, OffloadDevice, Precision, Strategy, ZeroStage

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

_NOT_BY_HAND = {
    "engine": "DeepSpeed takes over backward() and step(), which stand in the loop",
    "zero_stage": "DeepSpeed partitions, and takes over backward() and step(), which stand in the loop",
    "optimizer_offload": "DeepSpeed offloads, and takes over backward() and step(), which stand in the loop",
    "param_offload": "DeepSpeed offloads, and takes over backward() and step(), which stand in the loop",
    "precision": "it is a context around the forward pass, which stands in the loop (torch.autocast)",
    "micro_batch_size": "the loop makes its batches",
    "gradient_accumulation_steps": "the loop says when the optimizer steps",
    "gradient_clipping": "gradients are clipped in the loop (torch.nn.utils.clip_grad_norm_)",
    "compile": "torch.compile(model) goes around the model that is returned here",
    "group_by_length": "the loop makes its batches",
}
"""Fields of Strategy that a loop has to see to itself, and why."""


def apply_strategy(
    strategy: Strategy, model: Module, optimizer: Optimizer | None = None
) -> tuple[Module, Optimizer | None]:
    """Return a model and its optimizer as a strategy has them, for a training loop without accelerate.

    The model is frozen, adapted by LoRA, given its attention, Liger's kernels and gradient checkpointing, in
    place where that can be; then the optimizer's groups hold what trains, and another kind takes its place.
    What is done is printed to stderr.

    Args:
        strategy: what to apply.
        model: on its device, or before it goes there; not yet wrapped for several ranks, nor compiled.
        optimizer: of the model, before its first step; None where it is made of the returned model later.

    Returns:
        The model that trains, and its optimizer. Schedulers of the one given lead the one returned.

    Raises:
        UserError: the strategy has something that a loop must see to itself, or the model can't take it.
    """
    _check_possible(strategy, optimizer)
    changes = Changes(announce=os.environ.get("RANK", "0") == "0")
    notes: list[str] = []
    if strategy.tf32 is not None:
        from zerofit.model_changes.number_formats import set_tf32

        notes += set_tf32(strategy.tf32)
    model, others = changed(model, strategy, precision=None)
    notes += others
    if optimizer is not None:
        hold_what_trains(model, [optimizer])
        if strategy.optimizer is not None:
            own = type(optimizer).__name__
            optimizer = swap(optimizer, strategy.optimizer, modules=model.modules())
            notes.append(f"the optimizer is {type(optimizer).__name__}, on the groups of {own}")
    for note in notes:
        changes.add(note)
    return model, optimizer


def _check_possible(strategy: Strategy, optimizer: Any) -> None:
    nothing = Strategy(precision=Precision.FP32)
    for field, why in _NOT_BY_HAND.items():
        value = getattr(strategy, field)
        if value in (getattr(nothing, field), None, False):
            continue
        raise UserError(
            "not-in-a-plain-loop",
            f"a plain loop can't be given {field}",
            found=f"Strategy({field}={_said(value)})",
            why=why,
            fix="use accelerate or a Trainer: zerofit.accelerator(), zerofit.trainer(), or `zerofit launch`",
        )
    if strategy.optimizer is not None and optimizer is None:
        raise UserError(
            "no-optimizer-given",
            "another optimizer takes over the groups of the loop's own",
            found=f"Strategy(optimizer={_said(strategy.optimizer)}) and no optimizer",
            why="learning rate and weight decay come from the loop's optimizer",
            fix="give the loop's optimizer as the third argument",
        )


def _said(value: Any) -> str:
    is_enum = isinstance(value, Engine | OffloadDevice | ZeroStage | Precision)
    return f"{type(value).__name__}.{value.name}" if is_enum else str(value)
