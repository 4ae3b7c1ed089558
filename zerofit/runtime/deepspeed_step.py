"""Lets a script's own clip_grad_norm_ count under DeepSpeed, which by itself ignores it.

accelerate runs DeepSpeed's whole optimizer step inside `backward`, so that a later `clip_grad_norm_` comes
too late. Here the step waits until the script clips, steps, or starts the next backward pass.
"""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

_waiting: list[Any] = []
"""Engines with a backward pass done and their step to come; one entry at most for each engine."""


def defer_step(module: ModuleType) -> None:
    """Make accelerate's DeepSpeed wrappers step when the script steps.

    Args:
        module: accelerate.utils.deepspeed.
    """
    # DeepSpeed 0.19 calls collectives that torch 2.13 renames, thousands of times; no script can mend that.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    wrapper = module.DeepSpeedEngineWrapper

    def backward(self: Any, loss: Any, sync_gradients: bool = True, **kwargs: Any) -> None:
        step_now(self.engine)
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)
        if sync_gradients:
            _waiting.append(self.engine)

    def step(self: Any) -> None:
        step_all()

    wrapper.backward = functools.wraps(wrapper.backward)(backward)
    module.DeepSpeedOptimizerWrapper.step = functools.wraps(module.DeepSpeedOptimizerWrapper.step)(step)


def clip_and_step(engine: Any, max_norm: float) -> None:
    """Run the waiting step of an engine with its gradients clipped.

    Args:
        engine: a DeepSpeedEngine.
        max_norm: largest norm of all gradients together; 0 turns clipping off.
    """
    # ZeRO optimizers read their own field (deepspeed/runtime/zero/stage3.py, unscale_and_clip_grads); at
    # stage 0 in fp32 the engine reads its configuration (deepspeed/runtime/engine.py, _take_model_step).
    engine._config.gradient_clipping = max_norm
    if hasattr(engine.optimizer, "clip_grad"):
        engine.optimizer.clip_grad = max_norm
    step_now(engine)


def step_now(engine: Any) -> None:
    """Run the step of this engine, if one waits."""
    if engine in _waiting:
        _waiting.remove(engine)
        engine.step()


def step_all() -> None:
    """Run every step that waits."""
    for engine in tuple(_waiting):
        step_now(engine)
