"""Hooks that make DeepSpeed step where the script steps, and before anything looks at the weights."""

from __future__ import annotations

import warnings
import weakref
from types import MethodType
from typing import TYPE_CHECKING, Any

from zerofit.core.upstream.accelerate import prepared_models, prepared_optimizers, prepared_schedulers
from zerofit.core.upstream.deepspeed import hook_own_backward
from zerofit.training.deepspeed.deepspeed_refusals import steps_unprepared_optimizer
from zerofit.training.deepspeed.deepspeed_window import Window
from zerofit.training.deepspeed.skipped_steps import watch_engine
from zerofit.training.micro_batches.hooks import settle
from zerofit.training.wrapping import wrap

if TYPE_CHECKING:
    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings


def window_of(accelerator: Any) -> Window | None:
    """Return the window of the engine that an Accelerator runs backward passes on; None without DeepSpeed."""
    wrapped = getattr(accelerator, "deepspeed_engine_wrapped", None)
    return None if wrapped is None else wrapped.engine.__dict__.get("_zerofit_window")


def watch(accelerator: Any, changes: Changes) -> None:
    """Let the engines and optimizers that an Accelerator has prepared step where the script steps."""
    for engine in prepared_models(accelerator):
        if hasattr(engine, "set_gradient_accumulation_boundary") and "_zerofit_window" not in engine.__dict__:
            _watch_engine(engine, accelerator, changes)
    for scheduler in prepared_schedulers(accelerator):
        if "_zerofit_watched" not in scheduler.__dict__:
            scheduler._zerofit_watched = True
            scheduler.step = MethodType(_after_step_of(accelerator, type(scheduler).step), scheduler)


def _watch_engine(engine: Any, accelerator: Any, changes: Changes) -> None:
    held = weakref.ref(accelerator)
    window = Window(
        engine, accelerator.gradient_state, changes, settle=lambda loss: settle(held(), except_for=loss)
    )
    engine._zerofit_window = window
    watch_engine(engine, changes)
    engine.register_forward_pre_hook(_before_forward)
    hook_own_backward(engine, window.begin_own_backward)
    for wrapper in prepared_optimizers(accelerator):
        if wrapper.optimizer is engine.optimizer:
            wrapper._zerofit_window = window
            # Bound methods: a scheduler made of the wrapper later reads the function behind its step().
            wrapper.step = MethodType(_step, wrapper)
            wrapper.zero_grad = MethodType(_zero_grad, wrapper)


def refuse_step_of(optimizer: Any, window: Window) -> None:
    """Refuse steps of an optimizer that only DeepSpeed may step: the script's, which it did not prepare."""

    def check(*_: Any) -> None:
        if not window.is_stepping:
            raise steps_unprepared_optimizer()

    optimizer.register_step_pre_hook(check)


def _before_forward(engine: Any, _: Any) -> None:
    import torch

    if engine.training and torch.is_grad_enabled():
        engine._zerofit_window.go_on()
    else:
        engine._zerofit_window.end()


def _step(optimizer: Any, closure: Any = None) -> None:
    optimizer._zerofit_window.step()


def _zero_grad(optimizer: Any, set_to_none: bool | None = None) -> None:
    optimizer._zerofit_window.zero_grad()


def _after_step_of(accelerator: Any, original: Any) -> Any:
    """Return a scheduler's step() that comes after the step which a script leaves to accelerate."""
    held = weakref.ref(accelerator)

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        window = window_of(held())
        if window is not None:
            window.end()
        return original(self, *args, **kwargs)

    return step


def install(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> None:
    """Take the step that a script leaves to accelerate before it saves, evaluates or ends."""
    if not settings.uses_deepspeed:
        return
    # DeepSpeed 0.19 calls collectives that torch 2.13 renames, thousands of times; no script can mend that.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    looks = dict.fromkeys(("save_state", "save_model", "get_state_dict", "unwrap_model"), Window.end)
    for name, act in {**looks, "end_training": Window.close}.items():

        def after_step(original: Any, self: Any, *args: Any, act: Any = act, **kwargs: Any) -> Any:
            window = window_of(self)
            if window is not None:
                act(window)
            return original(self, *args, **kwargs)

        wrap(accelerator_class, name, after_step)
