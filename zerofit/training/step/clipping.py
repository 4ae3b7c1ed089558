"""Hooks on accelerate's and torch's gradient clipping: the script's under DeepSpeed, or the plan's."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

from zerofit.core.upstream.accelerate import prepared_models
from zerofit.training.batch.micro_batches.hooks import settle
from zerofit.training.setup.trained_groups import parameters_of
from zerofit.training.step.deepspeed.optimizer_step import clips_by_value, window_of
from zerofit.training.wrapping import around_steps

if TYPE_CHECKING:
    from types import ModuleType

    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper

_accelerators: weakref.WeakSet[Any] = weakref.WeakSet()
"""All Accelerators, whose parameters may be passed to torch's clipping, which knows no Accelerator."""


def wrappers(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Apply the script's or the plan's clipping; without DeepSpeed, whose configuration clips, also if the
    script does not clip."""
    forced = settings.strategy.gradient_clipping

    def clip(original: Any, self: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        self._zerofit_clipped = True
        max_norm = _norm_instead(max_norm, forced, changes)
        window = window_of(self)
        if window is not None:
            return window.clip(max_norm, norm_type=norm_type)
        self._zerofit_is_clipping = True  # torch's clipping, which is hooked too, is called by accelerate
        try:
            return original(self, parameters, _torch_norm(max_norm, forced), norm_type)
        finally:
            self._zerofit_is_clipping = False

    def clip_value(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        _check_not_by_value(self)
        original(self, *args, **kwargs)

    def step(self: Any, optimizer: Any, original: Any, closure: Any = None) -> None:
        if self.sync_gradients:
            if not getattr(self, "_zerofit_clipped", False):
                changes.add(f"gradients are clipped to {forced:g}; the script does not clip")
                self.clip_grad_norm_(list(parameters_of(optimizer)), forced)
            self._zerofit_clipped = False
        original(closure)

    found = {"clip_grad_norm_": clip, "clip_grad_value_": clip_value}
    if forced:
        by_script = around_steps("_zerofit_clips", step, only=lambda self, _: self._zerofit_by_script)
        found["prepare_optimizer"] = by_script
    return found


def watch_wrappers(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Record every Accelerator, whose parameters a script may clip with torch."""

    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _accelerators.add(self)

    return {"__init__": init}


def torch_wrappers(module: ModuleType, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Make torch's clipping work under ZeRO, where it finds no gradients, and use the plan's norm.

    Args:
        module: torch.nn.utils.
    """
    forced = settings.strategy.gradient_clipping

    def clip(
        original: Any, parameters: Any, max_norm: float, norm_type: float = 2.0, *args: Any, **kwargs: Any
    ) -> Any:
        parameters = _as_list(parameters)
        accelerator = _accelerator_of(parameters)
        if accelerator is None or getattr(accelerator, "_zerofit_is_clipping", False):
            return original(parameters, max_norm, norm_type, *args, **kwargs)
        accelerator._zerofit_clipped = True
        max_norm = _norm_instead(max_norm, forced, changes)
        window = window_of(accelerator)
        if window is not None:
            return window.clip(max_norm, norm_type=norm_type)
        settle(accelerator)
        return original(parameters, _torch_norm(max_norm, forced), norm_type, *args, **kwargs)

    def clip_value(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> None:
        parameters = _as_list(parameters)
        accelerator = _accelerator_of(parameters)
        _check_not_by_value(accelerator)
        settle(accelerator)
        original(parameters, *args, **kwargs)

    return {"clip_grad_norm_": clip, "clip_grad_value_": clip_value}


def install_in_clip_grad(module: ModuleType, settings: AppliedSettings, changes: Changes) -> None:
    """Give torch.nn.utils.clip_grad the functions of torch.nn.utils, which have the steps.

    Args:
        module: torch.nn.utils.
    """
    module.clip_grad.clip_grad_norm_ = module.clip_grad_norm_
    module.clip_grad.clip_grad_value_ = module.clip_grad_value_


def _norm_instead(max_norm: float, forced: float | None, changes: Changes) -> float:
    """Return the maximum norm: the plan's, or the script's if the plan has none."""
    if forced is None or forced == max_norm:
        return max_norm
    changes.add(
        f"gradients are clipped to {forced:g} (0 is off); the script says {float(max_norm):g}",
        once="gradient clipping",
    )
    return forced


def _torch_norm(max_norm: float, forced: float | None) -> float:
    """Return the norm for torch: a plan's 0 disables clipping, which torch would use as norm."""
    return math.inf if forced == 0 else max_norm


def _check_not_by_value(accelerator: Any) -> None:
    if window_of(accelerator) is not None:
        raise clips_by_value()


def _as_list(parameters: Any) -> list[Any]:
    import torch

    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _accelerator_of(parameters: list[Any]) -> Any | None:
    """Return the Accelerator whose model has the first of the parameters, or None."""
    for accelerator in tuple(_accelerators):
        for model in prepared_models(accelerator):
            if parameters and any(parameter is parameters[0] for parameter in model.parameters()):
                return accelerator
    return None
