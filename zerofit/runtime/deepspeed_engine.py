"""What a window does to the inside of a DeepSpeedEngine, and reads from it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


def expect_another_backward(engine: Any) -> None:
    """Let a second backward pass after one forward pass add to the first.

    Without it the second takes the place of the first
    (deepspeed/runtime/zero/stage3.py, clear_backward_seen_flag).
    """
    if hasattr(engine.optimizer, "clear_backward_seen_flag"):
        engine.optimizer.clear_backward_seen_flag()


def reduce_gradients(engine: Any) -> None:
    """Make gradients ready for a step that came after a backward pass which was not known to be the last."""
    engine.set_gradient_accumulation_boundary(is_boundary=True)
    if not engine.zero_optimization_partition_gradients():
        engine.allreduce_gradients()
    elif hasattr(engine.optimizer, "finalize_gradient_accumulation_boundary"):
        engine.optimizer.finalize_gradient_accumulation_boundary()


def forget_gradients(engine: Any) -> None:
    """Drop the gradients accumulated so far.

    ZeRO keeps them outside the parameters (deepspeed/runtime/zero/stage_1_and_2.py, all_grad_tensors); at
    stage 3 zero_grad() lets the next ones take their place.
    """
    optimizer = engine.optimizer
    optimizer.zero_grad()
    if hasattr(optimizer, "all_grad_tensors"):
        optimizer.all_grad_tensors.clear()
        optimizer.averaged_gradients.clear()
        optimizer.micro_step_id = -1
    engine.zero_grad()


@contextlib.contextmanager
def clipping_to(engine: Any, max_norm: float) -> Iterator[None]:
    """Clip to this norm inside, and as configured again after it.

    ZeRO optimizers read their own field (deepspeed/runtime/zero/stage3.py, unscale_and_clip_grads); at
    stage 0 in fp32 the engine reads its configuration (deepspeed/runtime/engine.py, _take_model_step).

    Args:
        engine: a DeepSpeedEngine.
        max_norm: largest norm of all gradients together; 0 turns clipping off.
    """
    holders = [(engine._config, "gradient_clipping")]
    if hasattr(engine.optimizer, "clip_grad"):
        holders.append((engine.optimizer, "clip_grad"))
    configured = [getattr(holder, name) for holder, name in holders]
    try:
        for holder, name in holders:
            setattr(holder, name, max_norm)
        yield
    finally:
        for (holder, name), value in zip(holders, configured, strict=True):
            setattr(holder, name, value)


@contextlib.contextmanager
def multiplying_gradients(engine: Any, factor: float) -> Iterator[None]:
    """Let a step inside see all gradients multiplied with a factor, their norm too.

    ZeRO optimizers divide by the scale of the loss as they step, and a script may set another
    (deepspeed/runtime/zero/stage_1_and_2.py, override_loss_scale); without ZeRO the parameters have them.

    Args:
        engine: a DeepSpeedEngine, whose gradients are reduced.
        factor: above 0.
    """
    optimizer = engine.optimizer
    if factor == 1.0:
        yield
    elif not engine.zero_optimization():
        for parameter in engine.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        yield
    else:
        before = optimizer.custom_loss_scaler, optimizer.external_loss_scale
        optimizer.external_loss_scale = optimizer.loss_scale / factor
        optimizer.custom_loss_scaler = True
        try:
            yield
        finally:
            optimizer.custom_loss_scaler, optimizer.external_loss_scale = before


def norm_of_last_step(engine: Any) -> Any:
    """Return the norm of all gradients in the last step, a tensor; not finite where that was skipped."""
    import torch

    if getattr(engine.optimizer, "overflow", False):
        norm = float("inf")
    else:
        norm = float(engine.get_global_grad_norm() or 0.0)
        if norm < 0:  # what DeepSpeed writes for a norm that is no number (deepspeed/runtime/utils.py)
            norm = float("nan")
    return torch.tensor(norm, device=device_of(engine))


def device_of(engine: Any) -> Any:
    """Return the device that an engine trains on; None is torch's default."""
    return getattr(engine, "device", None)
