"""Hooks into torch's own clipping, which many loops call in place of accelerate's."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

from zerofit.core.upstream.accelerate import prepared_models
from zerofit.training.clipping import norm_instead, torch_norm
from zerofit.training.deepspeed.deepspeed_refusals import clips_by_value
from zerofit.training.deepspeed.deepspeed_step import window_of
from zerofit.training.micro_batches import settle

if TYPE_CHECKING:
    from types import ModuleType

    from zerofit.training.changes import Changes

_accelerators: weakref.WeakSet[Any] = weakref.WeakSet()
"""All that have prepared something: torch's clipping knows none."""


def watch(accelerator_class: Any) -> None:
    """Note every Accelerator whose parameters a script may clip.

    Args:
        accelerator_class: accelerate's Accelerator, or a subclass.
    """
    original = accelerator_class.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _accelerators.add(self)

    accelerator_class.__init__ = init


def install(module: ModuleType, changes: Changes, *, forced: float | None) -> None:
    """Let torch's clipping count: under ZeRO it finds no gradients, and a plan may clip otherwise.

    Args:
        module: torch.nn.utils; scripts import from its clip_grad too.
        changes: where to note what was changed.
        forced: the plan's clipping; None leaves the script's.
    """
    by_norm, by_value = module.clip_grad_norm_, module.clip_grad_value_

    @functools.wraps(by_norm)
    def clip(parameters: Any, max_norm: float, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
        parameters = _as_list(parameters)
        accelerator = _accelerator_of(parameters)
        if accelerator is None or getattr(accelerator, "_zerofit_is_clipping", False):
            return by_norm(parameters, max_norm, norm_type, *args, **kwargs)
        accelerator._zerofit_clipped = True
        max_norm = norm_instead(max_norm, forced, changes)
        window = window_of(accelerator)
        if window is not None:
            return window.clip(max_norm, norm_type=norm_type)
        settle(accelerator)
        return by_norm(parameters, torch_norm(max_norm, forced), norm_type, *args, **kwargs)

    @functools.wraps(by_value)
    def clip_value(parameters: Any, *args: Any, **kwargs: Any) -> None:
        parameters = _as_list(parameters)
        accelerator = _accelerator_of(parameters)
        if accelerator is not None and window_of(accelerator) is not None:
            raise clips_by_value()
        settle(accelerator)
        by_value(parameters, *args, **kwargs)

    places: tuple[Any, ...] = (module, module.clip_grad)
    for place in places:
        place.clip_grad_norm_ = clip
        place.clip_grad_value_ = clip_value


def _as_list(parameters: Any) -> list[Any]:
    import torch

    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _accelerator_of(parameters: list[Any]) -> Any | None:
    """Return the Accelerator whose model holds the first of the parameters; None without."""
    for accelerator in tuple(_accelerators):
        for model in prepared_models(accelerator):
            if parameters and any(parameter is parameters[0] for parameter in model.parameters()):
                return accelerator
    return None
