"""Hooks into accelerate's clipping: the script's own under DeepSpeed, and the plan's in its place."""

from __future__ import annotations

import contextlib
import functools
import math
from types import MethodType
from typing import TYPE_CHECKING, Any

from zerofit.training.deepspeed.deepspeed_refusals import clips_by_value
from zerofit.training.deepspeed.deepspeed_step import window_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.training.changes import Changes


def install(accelerator_class: Any, changes: Changes, *, forced: float | None) -> None:
    """Make `Accelerator.clip_grad_norm_` count.

    Args:
        accelerator_class: accelerate's Accelerator, or a subclass.
        changes: where to note what was changed.
        forced: the plan's largest norm, 0 for no clipping; None leaves the script's.
    """
    by_norm, by_value = accelerator_class.clip_grad_norm_, accelerator_class.clip_grad_value_

    @functools.wraps(by_norm)
    def clip(self: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        self._zerofit_clipped = True
        max_norm = norm_instead(max_norm, forced, changes)
        window = window_of(self)
        if window is not None:
            return window.clip(max_norm, norm_type=norm_type)
        with _within_accelerate(self):
            return by_norm(self, parameters, torch_norm(max_norm, forced), norm_type)

    @functools.wraps(by_value)
    def clip_value(self: Any, parameters: Any, clip_value: float) -> None:
        if window_of(self) is not None:
            raise clips_by_value()
        by_value(self, parameters, clip_value)

    accelerator_class.clip_grad_norm_ = clip
    accelerator_class.clip_grad_value_ = clip_value
    if forced:
        _hook_optimizers(accelerator_class, forced, changes)


def norm_instead(max_norm: float, forced: float | None, changes: Changes) -> float:
    """Return the largest norm that is clipped to, in place of the script's.

    Args:
        max_norm: the script's.
        forced: the plan's, 0 for no clipping; None leaves the script's.
        changes: where to note what was changed.
    """
    if forced is None or forced == max_norm:
        return max_norm
    changes.add(
        f"gradients are clipped to {forced:g} (0 is off); the script says {float(max_norm):g}",
        once="gradient clipping",
    )
    return forced


def torch_norm(max_norm: float, forced: float | None) -> float:
    """Return what torch is told: a plan's 0 turns clipping off, where torch would take it for a norm."""
    return math.inf if forced == 0 else max_norm


@contextlib.contextmanager
def _within_accelerate(accelerator: Any) -> Iterator[None]:
    """Tell torch's clipping, which is hooked too, that accelerate is what calls it."""
    accelerator._zerofit_is_clipping = True
    try:
        yield
    finally:
        accelerator._zerofit_is_clipping = False


def _hook_optimizers(accelerator_class: Any, max_norm: float, changes: Changes) -> None:
    """Clip before each step of a script that does not clip itself; DeepSpeed does so by its configuration."""
    original = accelerator_class.prepare_optimizer

    @functools.wraps(original)
    def prepare_optimizer(self: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = original(self, *args, **kwargs)
        if self._zerofit_by_script and "_zerofit_clips" not in optimizer.__dict__:
            optimizer._zerofit_clips = True
            optimizer.step = MethodType(_clipping_step(self, optimizer.step, max_norm, changes), optimizer)
        return optimizer

    accelerator_class.prepare_optimizer = prepare_optimizer


def _clipping_step(accelerator: Any, original: Any, max_norm: float, changes: Changes) -> Any:
    accelerator._zerofit_clipped = False

    def step(self: Any, closure: Any = None) -> None:
        if accelerator.sync_gradients:
            if not accelerator._zerofit_clipped:
                changes.add(f"gradients are clipped to {max_norm:g}; the script does not clip")
                parameters = [parameter for group in self.param_groups for parameter in group["params"]]
                accelerator.clip_grad_norm_(parameters, max_norm)
            accelerator._zerofit_clipped = False
        original(closure)

    return step
