"""Accelerator.backward under a plan: in pieces, and under DeepSpeed when the script's own step is known."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.training.deepspeed.deepspeed_step import window_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerofit.training.changes import Changes
    from zerofit.training.deepspeed.deepspeed_window import Window
    from zerofit.training.settings import Settings


def install(accelerator_class: Any, settings: Settings, changes: Changes) -> None:
    """Hook backward() and trigger_sync_in_backward().

    Args:
        accelerator_class: accelerate's Accelerator, or a subclass.
        settings: what the plan sets.
        changes: where to note what was changed.
    """
    original = accelerator_class.backward

    @functools.wraps(original)
    def backward(self: Any, loss: Any, **kwargs: Any) -> None:
        weights = getattr(self, "_zerofit_weights", None)
        if weights is not None and getattr(self, "_zerofit_accumulates", False):
            loss = weights.weighted(loss)
        window = window_of(self)
        if window is not None:
            _under_deepspeed(self, window, loss, kwargs)
            return
        splitter = _waiting_splitter(self)
        if splitter is None:
            original(self, loss, **kwargs)
            return
        if "learning_rate" in kwargs:
            raise _steps_within_backward()
        splitter.backward(
            loss / self.gradient_accumulation_steps,
            run=_native_piece(self, kwargs),
            is_boundary=self.sync_gradients,
        )

    accelerator_class.backward = backward
    accelerator_class.trigger_sync_in_backward = staticmethod(
        _trigger(accelerator_class.trigger_sync_in_backward)
    )


def _steps_within_backward() -> UserError:
    return UserError(
        "no-micro-batches-with-lomo",
        "LOMO can't train in micro-batches",
        found="accelerator.backward(loss, learning_rate=...), and forward passes split into micro-batches",
        why="LOMO steps within each backward pass, so that every micro-batch would be a step of its own",
        fix="leave out --micro-batch-size, or take another optimizer",
        see="https://github.com/OpenLMLab/LOMO",
    )


def _trigger(original: Any) -> Any:
    """Return what makes the next backward pass exchange gradients, of a model that runs in pieces too.

    accelerate prepares DistributedDataParallel for a backward pass without a forward pass of its own
    (accelerate/accelerator.py); pieces have one, and the last of them exchanges.
    """

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

    return trigger_sync_in_backward


def _waiting_splitter(accelerator: Any) -> Any | None:
    splitter = getattr(accelerator, "_zerofit_splitter", None)
    return splitter if splitter is not None and splitter.is_waiting else None


def _native_piece(accelerator: Any, kwargs: dict[str, Any]) -> Callable[[Any, bool], None]:
    """Return what runs the backward pass of one piece, as accelerate runs that of the whole."""

    def run(loss: Any, is_boundary: bool) -> None:
        scaled = loss if accelerator.scaler is None else accelerator.scaler.scale(loss)
        scaled.backward(**kwargs)

    return run


def _under_deepspeed(accelerator: Any, window: Window, loss: Any, kwargs: dict[str, Any]) -> None:
    engine = window.engine
    if kwargs.pop("scale_wrt_gas", True):
        # As in one process, where the number may change while the script runs; DeepSpeed's stays.
        loss = loss / accelerator.gradient_accumulation_steps

    def run_piece(piece: Any, is_boundary: bool) -> None:
        engine.set_gradient_accumulation_boundary(is_boundary=is_boundary)
        engine.backward(piece, scale_wrt_gas=False, **kwargs)

    def run(is_boundary: bool) -> None:
        splitter = _waiting_splitter(accelerator)
        if splitter is None:
            run_piece(loss, is_boundary)
        else:
            splitter.backward(loss, run=run_piece, is_boundary=is_boundary)

    if accelerator._zerofit_by_script and accelerator.sync_gradients:
        window.wait(run, loss=loss)
    else:
        window.go_on()
        window.run(run, is_boundary=accelerator.sync_gradients, loss=loss)
