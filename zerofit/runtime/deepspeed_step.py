"""Lets a script's own clip_grad_norm_ count under DeepSpeed, which by itself ignores it.

accelerate runs DeepSpeed's whole optimizer step inside `backward`, so that a later `clip_grad_norm_` comes
too late. Here the step waits until the script clips or steps. A script that does neither, knowing that
accelerate steps for it, gets its step before the next forward pass, and before it saves or ends.
"""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any

from zerofit.errors import UserError

if TYPE_CHECKING:
    from types import ModuleType

    from zerofit.runtime.changes import Changes

_waiting: list[Any] = []
"""Engines with a backward pass done and their step to come."""
_stepped_by_forward: list[Any] = []
"""Engines that took a step because a forward pass came before the script's own step."""


def install(module: ModuleType) -> None:
    """Make accelerate's DeepSpeed wrappers step when the script steps.

    Args:
        module: accelerate.utils.deepspeed.
    """
    # DeepSpeed 0.19 calls collectives that torch 2.13 renames, thousands of times; no script can mend that.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    wrapper, optimizer_wrapper = module.DeepSpeedEngineWrapper, module.DeepSpeedOptimizerWrapper

    def backward(self: Any, loss: Any, sync_gradients: bool = True, **kwargs: Any) -> None:
        _step_before_forward(self.engine)
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)
        if sync_gradients:
            _waiting.append(self.engine)
            _watch_forward(self.engine)

    def step(self: Any) -> None:
        if _stepped_by_forward:
            raise _two_backwards_a_step()
        step_all()

    wrapper.backward = functools.wraps(wrapper.backward)(backward)
    optimizer_wrapper.step = functools.wraps(optimizer_wrapper.step)(step)


def hook_ends(accelerator_class: Any) -> None:
    """Take the waiting step before a script saves or ends."""
    for name in ("save_state", "save_model", "get_state_dict", "end_training"):
        original = getattr(accelerator_class, name)

        @functools.wraps(original)
        def after_step(self: Any, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            step_all()
            return original(self, *args, **kwargs)

        setattr(accelerator_class, name, after_step)


def hook_torch_clipping(module: ModuleType, changes: Changes, *, forced: float | None) -> None:
    """Let torch's own clip_grad_norm_ count too, which finds no gradients under ZeRO.

    Args:
        module: torch.nn.utils.
        changes: where to note what was changed.
        forced: the plan's clipping; None leaves the script's.
    """
    original = module.clip_grad_norm_

    @functools.wraps(original)
    def clip(parameters: Any, max_norm: float, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
        if not _waiting:
            return original(parameters, max_norm, norm_type, *args, **kwargs)
        import torch

        engine = _waiting[-1]
        clip_and_step(engine, max_norm if forced is None else forced, changes, norm_type=norm_type)
        return torch.as_tensor(engine.get_global_grad_norm())

    module.clip_grad_norm_ = clip  # type: ignore[attr-defined]


def clip_and_step(engine: Any, max_norm: float, changes: Changes, *, norm_type: float = 2.0) -> None:
    """Run the waiting step of an engine with its gradients clipped, this once.

    Args:
        engine: a DeepSpeedEngine.
        max_norm: largest norm of all gradients together; 0 turns clipping off.
        changes: where to note what was changed.
        norm_type: the norm that the script asks for.
    """
    if norm_type != 2:
        changes.add(f"gradients are clipped by their 2-norm, the only one DeepSpeed has, not {norm_type:g}")
    # ZeRO optimizers read their own field (deepspeed/runtime/zero/stage3.py, unscale_and_clip_grads); at
    # stage 0 in fp32 the engine reads its configuration (deepspeed/runtime/engine.py, _take_model_step).
    holders = [(engine._config, "gradient_clipping")]
    if hasattr(engine.optimizer, "clip_grad"):
        holders.append((engine.optimizer, "clip_grad"))
    configured = [getattr(holder, name) for holder, name in holders]
    for holder, name in holders:
        setattr(holder, name, max_norm)
    _step_now(engine)
    for (holder, name), value in zip(holders, configured, strict=True):
        setattr(holder, name, value)


def step_all() -> None:
    """Run every step that waits."""
    for engine in tuple(_waiting):
        _step_now(engine)


def _step_now(engine: Any) -> None:
    if engine in _waiting:
        _waiting.remove(engine)
        engine.step()


def _watch_forward(engine: Any) -> None:
    if not hasattr(engine, "_zerofit_watched"):
        engine._zerofit_watched = engine.register_forward_pre_hook(
            lambda module, _: _step_before_forward(module)
        )


def _step_before_forward(engine: Any) -> None:
    if engine in _waiting:
        _step_now(engine)
        _stepped_by_forward.append(engine)


def _two_backwards_a_step() -> UserError:
    return UserError(
        "script-accumulates-by-hand",
        "the script accumulates gradients by hand, which DeepSpeed would take for separate steps",
        found="a forward and backward pass between backward() and optimizer.step()",
        why="under DeepSpeed accelerate ends each backward() with an optimizer step, outside accumulate()",
        fix="put the training step into `with accelerator.accumulate(model):`, or use --engine native",
        see="https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation",
    )
