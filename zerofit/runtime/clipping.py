"""Hooks into accelerate's clipping: the script's own under DeepSpeed, and the plan's in its place."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

from zerofit.runtime import deepspeed_step

if TYPE_CHECKING:
    from types import ModuleType

    from zerofit.runtime.changes import Changes


def install(module: ModuleType, changes: Changes, *, forced: float | None) -> None:
    """Make `Accelerator.clip_grad_norm_` count.

    Args:
        module: accelerate.accelerator.
        changes: where to note what was changed.
        forced: the plan's largest norm, 0 for no clipping; None leaves the script's.
    """
    original = module.Accelerator.clip_grad_norm_

    @functools.wraps(original)
    def clip(self: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        if forced is not None and forced != max_norm:
            changes.add(f"gradients are clipped to {forced:g} (0 is off); the script says {max_norm:g}")
            max_norm = forced
        self._zerofit_clipped = True
        wrapped = getattr(self, "deepspeed_engine_wrapped", None)
        if wrapped is not None:
            deepspeed_step.clip_and_step(wrapped.engine, max_norm, changes, norm_type=norm_type)
        return original(self, parameters, max_norm or math.inf, norm_type)

    module.Accelerator.clip_grad_norm_ = clip
    if forced:
        _hook_step(module, forced, changes)


def _hook_step(module: ModuleType, max_norm: float, changes: Changes) -> None:
    """Clip before each step of a script that does not clip itself; DeepSpeed does so by its configuration."""
    original_backward = module.Accelerator.backward
    original_step = module.AcceleratedOptimizer.step
    accelerators: list[Any] = []

    @functools.wraps(original_backward)
    def backward(self: Any, *args: Any, **kwargs: Any) -> None:
        accelerators[:] = [self]
        self._zerofit_clipped = False
        original_backward(self, *args, **kwargs)

    @functools.wraps(original_step)
    def step(self: Any, closure: Any = None) -> None:
        if accelerators and self.gradient_state.sync_gradients and not accelerators[0]._zerofit_clipped:
            changes.add(f"gradients are clipped to {max_norm:g}; the script does not clip")
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            accelerators[0].clip_grad_norm_(parameters, max_norm)
        original_step(self, closure)

    module.Accelerator.backward = backward
    module.AcceleratedOptimizer.step = step
