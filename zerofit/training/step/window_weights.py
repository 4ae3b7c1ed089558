"""Weights the batches of an accumulation window that zerofit configured as if they were one batch.

accelerate divides each batch's loss by the number of batches in a full window: in a shorter last window the
step is too small, and in all windows a batch with few labels counts as much as one with many. Here a batch
counts by the items that its loss is averaged over, relative to all items of the window on all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.core.upstream.accelerate import prepared_models, prepared_optimizers
from zerofit.core.upstream.fsdp2 import is_sharded, unreduced_gradients
from zerofit.training.setup.trained_groups import parameters_of
from zerofit.training.step.deepspeed.optimizer_step import window_of
from zerofit.training.step.loss_items import items_of

if TYPE_CHECKING:
    from zerofit.training.changes import Changes

_UNWEIGHTED = "batches of a window are weighted equally, as in accelerate, and a shorter last window less"


class WindowWeights:
    """The windows of one Accelerator.

    A window's total items are unknown until its last batch. Losses are therefore weighted by their items
    relative to the run's first batch, and the last batch corrects the gradients so far; under DeepSpeed the
    step corrects them.
    """

    def __init__(self, accelerator: Any, changes: Changes) -> None:
        self._accelerator = accelerator
        self._changes = changes
        self._is_on: bool | None = None
        """True if losses are weighted; None before the first backward pass."""
        self._reference: Any = None
        """Items of the run's first batch, equal on all ranks."""
        self._total: Any = 0
        """Items of the window so far, on this rank."""
        self._num_batches = 0
        self._weight: Any = None
        """The weight of this batch's loss; None before its first backward pass."""
        self._is_closed = False
        """True if the window's gradients are already corrected."""

    def begin_batch(self) -> None:
        """Handle a call of accumulate(), while the Accelerator still has the previous batch's state."""
        self._weight = None
        if self._accelerator.sync_gradients:
            self._total, self._num_batches, self._is_closed = 0, 0, False

    def before_step(self) -> None:
        """Correct the gradients before the script steps or clips.

        The backward pass of the window's last batch does it, unless the script skips that, as for a NaN loss.
        """
        import torch

        is_due = self._is_on and self._num_batches and self._accelerator.sync_gradients
        # DeepSpeed only steps after a backward pass of the last batch.
        if is_due and not self._is_closed and window_of(self._accelerator) is None:
            with torch.no_grad():
                self._close()

    def weighted(self, loss: Any) -> Any:
        """Return the weighted loss, to be divided by the accumulation steps."""
        import torch

        if self._weight is None:
            with torch.no_grad():
                self._count(loss)
        return loss * self._weight.to(loss.dtype) if self._is_on else loss

    def _count(self, loss: Any) -> None:
        """Count a batch, and compute the weight of its losses."""
        items = None if self._is_on is False else items_of(loss)
        if self._is_on is None:
            self._begin(loss, items)
        if not self._is_on:
            return
        if items is None:
            self._changes.add(
                "a batch gets an average weight, since its loss does not show what it is averaged over"
            )
            items = self._total / self._num_batches if self._num_batches else self._reference
        self._total = self._total + items
        self._num_batches += 1
        self._weight = items / self._reference
        if self._accelerator.sync_gradients:
            self._close()

    def _begin(self, loss: Any, items: Any) -> None:
        """Decide, on all ranks together, whether losses can be weighted."""
        import torch

        why_not = self._why_not()
        if why_not is None:
            told = torch.zeros(2, device=loss.device)
            told[0] = float(items is None)
            told[1] = 1.0 if items is None else items.clamp_min(1.0)
            self._reduce(told, torch.distributed.ReduceOp.MAX)
            if told[0]:
                why_not = "the loss does not show what it is averaged over"
            self._reference = told[1]
        self._is_on = why_not is None
        if why_not is None:
            self._changes.add(
                "batches of a window are weighted by the labels or elements that their loss is averaged "
                "over, as in one large batch; accelerate weights them equally, and a shorter last window less"
            )
        else:
            self._changes.add(f"{_UNWEIGHTED}: {why_not}")

    def _why_not(self) -> str | None:
        kind = str(self._accelerator.distributed_type)
        is_fsdp2 = "FSDP" in kind and self._accelerator.is_fsdp2
        if not is_fsdp2 and any(name in kind for name in ("FSDP", "MEGATRON", "TP")):
            return f"{kind.rpartition('.')[2]} holds the gradients"
        if self._accelerator.num_processes > 1 and not self._accelerator.even_batches:
            return "ranks may have different numbers of batches"
        window = window_of(self._accelerator)
        if window is not None and type(window.engine.optimizer).__name__ == "BF16_Optimizer":
            return "DeepSpeed's BF16_Optimizer holds the gradients"
        return None

    def _close(self) -> None:
        """Correct the window's gradients, now that its last batch is known."""
        import torch

        self._is_closed = True
        ranks = self._accelerator.num_processes
        total = self._total.clone()
        self._reduce(total, torch.distributed.ReduceOp.SUM)
        steps = self._accelerator.gradient_accumulation_steps
        # Ranks' gradients are averaged; a window without items is NaN, as one batch without items would be.
        factor = torch.where(total > 0, ranks * steps * self._reference / total, 1.0)
        window = window_of(self._accelerator)
        if window is not None:
            window.gradient_factor = float(factor)
            return
        held = (
            parameter
            for optimizer in prepared_optimizers(self._accelerator)
            for parameter in parameters_of(optimizer)
        )
        for parameter in set(held):
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        for model in prepared_models(self._accelerator):
            for gradient in unreduced_gradients(model) if is_sharded(model) else ():
                gradient.mul_(factor)
        if self._weight is not None:
            self._weight = self._weight * factor

    def _reduce(self, numbers: Any, operation: Any) -> None:
        import torch

        if self._accelerator.num_processes > 1:
            torch.distributed.all_reduce(numbers, op=operation)
