"""Hooks that make DeepSpeed step where the script steps, with the gradients and the clipping it asks for."""

from __future__ import annotations

import functools
import warnings
import weakref
from types import MethodType
from typing import TYPE_CHECKING, Any

from zerofit.errors import UserError
from zerofit.runtime.deepspeed_window import Window

if TYPE_CHECKING:
    from types import ModuleType

    from zerofit.runtime.changes import Changes

_windows: weakref.WeakSet[Window] = weakref.WeakSet()
"""Of every engine: torch's own clipping knows no engine."""


def window_of(accelerator: Any) -> Window | None:
    """Return the window of the engine that an Accelerator runs backward passes on; None without DeepSpeed."""
    wrapped = getattr(accelerator, "deepspeed_engine_wrapped", None)
    return None if wrapped is None else wrapped.engine.__dict__.get("_zerofit_window")


def watch(accelerator: Any, changes: Changes) -> None:
    """Let the engines and optimizers that an Accelerator has prepared step where the script steps.

    Args:
        accelerator: an Accelerator.
        changes: where to note what was changed.
    """
    for engine in accelerator._models:
        if not hasattr(engine, "set_gradient_accumulation_boundary") or "_zerofit_window" in engine.__dict__:
            continue
        window = Window(engine, accelerator.gradient_state, changes)
        engine._zerofit_window = window
        _windows.add(window)
        engine.register_forward_pre_hook(_before_forward)
        for wrapper in accelerator._optimizers:
            if wrapper.optimizer is engine.optimizer:
                wrapper._zerofit_window = window
                # Bound methods: a scheduler made of the wrapper later reads the function behind its step().
                wrapper.step = MethodType(_step, wrapper)
                wrapper.zero_grad = MethodType(_zero_grad, wrapper)


def _before_forward(engine: Any, _: Any) -> None:
    import torch

    if engine.training and torch.is_grad_enabled():
        engine._zerofit_window.go_on()


def _step(optimizer: Any, closure: Any = None) -> None:
    optimizer._zerofit_window.step()


def _zero_grad(optimizer: Any, set_to_none: bool | None = None) -> None:
    optimizer._zerofit_window.zero_grad()


def hook_ends(accelerator_class: Any) -> None:
    """Take the step that a script leaves to accelerate before it saves or ends."""
    # DeepSpeed 0.19 calls collectives that torch 2.13 renames, thousands of times; no script can mend that.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    for name in ("save_state", "save_model", "get_state_dict", "end_training"):
        original = getattr(accelerator_class, name)

        @functools.wraps(original)
        def after_step(self: Any, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            window = window_of(self)
            if window is not None:
                window.end()
            return original(self, *args, **kwargs)

        setattr(accelerator_class, name, after_step)


def hook_torch_clipping(module: ModuleType, changes: Changes, *, forced: float | None) -> None:
    """Let torch's own clipping count too, which finds no gradients under ZeRO.

    Args:
        module: torch.nn.utils.
        changes: where to note what was changed.
        forced: the plan's clipping; None leaves the script's.
    """
    by_norm, by_value = module.clip_grad_norm_, module.clip_grad_value_

    @functools.wraps(by_norm)
    def clip(parameters: Any, max_norm: float, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
        import torch

        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        window = _window_with(parameters)
        if window is None:
            return by_norm(parameters, max_norm, norm_type, *args, **kwargs)
        window.clip(max_norm if forced is None else forced, norm_type=norm_type)
        return torch.as_tensor(window.engine.get_global_grad_norm() or 0.0)

    @functools.wraps(by_value)
    def clip_value(parameters: Any, *args: Any, **kwargs: Any) -> None:
        import torch

        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if _window_with(parameters) is not None:
            raise no_clipping_by_value()
        by_value(parameters, *args, **kwargs)

    module.clip_grad_norm_ = clip  # type: ignore[attr-defined]
    module.clip_grad_value_ = clip_value  # type: ignore[attr-defined]


def _window_with(parameters: list[Any]) -> Window | None:
    """Return the window of the engine that holds the first of the parameters."""
    for window in _windows:
        if any(parameter is parameters[0] for parameter in window.engine.parameters()):
            return window
    return None


def no_clipping_by_value() -> UserError:
    """Return the refusal of what DeepSpeed can't do."""
    return UserError(
        "deepspeed-clips-by-norm-only",
        "DeepSpeed can't clip gradients by their values",
        found="clip_grad_value_() under DeepSpeed",
        why="the gradients are partitioned over the ranks, and DeepSpeed clips their common norm only",
        fix="use accelerator.clip_grad_norm_() in the script, or --engine native",
        see="https://huggingface.co/docs/accelerate/usage_guides/deepspeed",
    )
