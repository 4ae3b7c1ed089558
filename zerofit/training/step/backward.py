"""Accelerator.backward under a plan: in micro-batches, and under DeepSpeed with the script's own steps."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from zerofit.training.step.deepspeed.optimizer_step import window_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.step.deepspeed.optimizer_step import Window
    from zerofit.training.wrapping import Wrapper


def wrappers(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Run a backward pass in micro-batches, and under DeepSpeed with the script's own steps."""

    def backward(original: Any, self: Any, loss: Any, **kwargs: Any) -> None:
        weights = getattr(self, "_zerofit_weights", None)
        if weights is not None and getattr(self, "_zerofit_accumulates", False):
            loss = weights.weighted(loss)
        window = window_of(self)
        if window is not None:
            _under_deepspeed(self, window, loss, kwargs)
            return
        pending = _pending_passes(self)
        if pending is None:
            original(self, loss, **kwargs)
            return

        def run_piece(piece: Any, is_boundary: bool) -> None:
            scaled = piece if self.scaler is None else self.scaler.scale(piece)
            scaled.backward(**kwargs)

        pending.backward(
            loss / self.gradient_accumulation_steps, run=run_piece, is_boundary=self.sync_gradients
        )

    return {"backward": backward}


def install_trigger(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> None:
    """Make trigger_sync_in_backward() also work with micro-batches.

    accelerate prepares DistributedDataParallel for a backward pass without a forward pass
    (accelerate/accelerator.py); micro-batches have their own, and the last one synchronizes gradients.
    """
    original = accelerator_class.trigger_sync_in_backward

    @contextlib.contextmanager
    def trigger_sync_in_backward(model: Any) -> Iterator[None]:
        if not getattr(model.forward, "_zerofit_splits", False):
            with original(model):
                yield
            return
        model._zerofit_triggered = True
        try:
            yield
        finally:
            model._zerofit_triggered = False

    accelerator_class.trigger_sync_in_backward = staticmethod(trigger_sync_in_backward)


def _pending_passes(accelerator: Any) -> Any | None:
    """Return the split passes whose backward pass may still run; None if there are none."""
    pending = getattr(accelerator, "_zerofit_pending_backward", None)
    return pending if pending is not None and pending.is_any else None


def _under_deepspeed(accelerator: Any, window: Window, loss: Any, kwargs: dict[str, Any]) -> None:
    engine = window.engine
    if kwargs.pop("scale_wrt_gas", True):
        # A script may change this number, while DeepSpeed's own is constant.
        loss = loss / accelerator.gradient_accumulation_steps

    def run_piece(piece: Any, is_boundary: bool) -> None:
        engine.set_gradient_accumulation_boundary(is_boundary=is_boundary)
        engine.backward(piece, scale_wrt_gas=False, **kwargs)

    def run(is_boundary: bool) -> None:
        pending = _pending_passes(accelerator)
        if pending is None:
            run_piece(loss, is_boundary)
        else:
            pending.backward(loss, run=run_piece, is_boundary=is_boundary)

    if accelerator._zerofit_by_script and accelerator.sync_gradients:
        window.delay(run, loss=loss)
    else:
        window.before_training_pass()
        window.run(run, is_boundary=accelerator.sync_gradients, loss=loss)
