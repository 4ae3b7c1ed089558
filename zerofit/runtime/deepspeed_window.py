"""What one DeepSpeed engine does between two steps of its optimizer: whose step it is, and when.

accelerate runs DeepSpeed's whole optimizer step inside `backward`, so that gradients accumulated by hand
become steps of their own and a later `clip_grad_norm_` comes too late. Here the last backward pass waits
until it is known whether it ends the window: the script clips or steps, or goes on with another forward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.errors import UserError
from zerofit.runtime.step_calls import script_steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerofit.runtime.changes import Changes


class Window:
    """The backward passes of one engine between two steps of its optimizer.

    Args:
        engine: a DeepSpeedEngine.
        gradient_state: accelerate's GradientState.
        changes: where to note what was changed.
    """

    def __init__(self, engine: Any, gradient_state: Any, changes: Changes) -> None:
        self.engine = engine
        self._gradient_state = gradient_state
        self._changes = changes
        self._waiting: Callable[[bool], None] | None = None
        """Runs the last backward pass, with whether it ends the window."""
        self._has_gradients = False
        """Whether a backward pass has run since the last step."""
        self._is_reduced = False
        """Whether the last backward pass that ran was the window's last one."""
        self._stepped_by_clip = False
        """Whether clipping took a step that the script has yet to ask for."""
        self._script_steps: bool | None = None
        """Whether the script steps its optimizer under DeepSpeed; None while that is unknown."""

    def wait(self, run: Callable[[bool], None]) -> None:
        """Let a backward pass wait for what the script does next.

        Args:
            run: the backward pass; it takes whether it is the window's last one.
        """
        self.go_on()
        self._waiting = run

    def run(self, backward: Callable[[bool], None], *, is_boundary: bool) -> None:
        """Run a backward pass now.

        Args:
            backward: the backward pass; it takes whether it is the window's last one.
            is_boundary: whether a step of the optimizer follows.
        """
        self._waiting = None
        if self._has_gradients and hasattr(self.engine.optimizer, "clear_backward_seen_flag"):
            # Without it a second backward pass after one forward pass takes the place of the first
            # (deepspeed/runtime/zero/stage3.py, clear_backward_seen_flag).
            self.engine.optimizer.clear_backward_seen_flag()
        self.engine.set_gradient_accumulation_boundary(is_boundary=is_boundary)
        backward(is_boundary)
        self._has_gradients, self._is_reduced = True, is_boundary

    def go_on(self) -> None:
        """Act on another pass of training: the script's own step has come, or does not come now."""
        if self._stepped_by_clip:
            if self.script_steps:
                raise _clips_between_steps()
            self._stepped_by_clip = False
        if not self.script_steps:
            self._step_at_boundary()
        elif self._waiting is not None:
            self.run(self._waiting, is_boundary=False)

    def step(self) -> None:
        """Act on the script's optimizer.step()."""
        if not self._gradient_state.sync_gradients:
            return
        self._script_steps = True
        if self._stepped_by_clip:
            self._stepped_by_clip = False
        else:
            self._finish()

    def clip(self, max_norm: float, *, norm_type: float) -> None:
        """Take the step with its gradients clipped, this once: only the step knows their norm.

        Args:
            max_norm: largest norm of all gradients together; 0 turns clipping off.
            norm_type: the norm that the script asks for.
        """
        if norm_type != 2:
            self._changes.add(
                f"gradients are clipped by their 2-norm, the only one DeepSpeed has, not {norm_type:g}"
            )
        if not self._gradient_state.sync_gradients:
            self._changes.add("gradients are clipped when they are whole, not in each pass of accumulation")
            return
        if not (self._waiting or self._has_gradients):
            return
        # ZeRO optimizers read their own field (deepspeed/runtime/zero/stage3.py, unscale_and_clip_grads); at
        # stage 0 in fp32 the engine reads its configuration (deepspeed/runtime/engine.py, _take_model_step).
        holders = [(self.engine._config, "gradient_clipping")]
        if hasattr(self.engine.optimizer, "clip_grad"):
            holders.append((self.engine.optimizer, "clip_grad"))
        configured = [getattr(holder, name) for holder, name in holders]
        for holder, name in holders:
            setattr(holder, name, max_norm)
        self._finish()
        self._stepped_by_clip = True
        for (holder, name), value in zip(holders, configured, strict=True):
            setattr(holder, name, value)

    def zero_grad(self) -> None:
        """Act on the script's optimizer.zero_grad(): gradients that no step has used are lost."""
        if not self._gradient_state.sync_gradients or not (self._waiting or self._has_gradients):
            return
        if self.script_steps:
            self._waiting = None
            if self._has_gradients:
                _forget_gradients(self.engine)
            self._has_gradients = self._is_reduced = False

    def end(self) -> None:
        """Act on the script's saving or ending: only a step that it leaves to accelerate is due."""
        if not self.script_steps:
            self._step_at_boundary()

    @property
    def script_steps(self) -> bool:
        """Whether the script steps its optimizer itself; some leave that to accelerate."""
        if self._script_steps is None:
            if not (self._waiting or self._has_gradients or self._stepped_by_clip):
                return True  # nothing to decide yet
            self._script_steps = script_steps()
        return self._script_steps

    def _step_at_boundary(self) -> None:
        """Take the step that stock accelerate takes inside backward()."""
        if self._waiting is not None or self._is_reduced:
            self._finish()

    def _finish(self) -> None:
        """End the window: its last backward pass, if that waits, and the step."""
        if self._waiting is not None:
            self.run(self._waiting, is_boundary=True)
        if not self._has_gradients:
            return
        if not self._is_reduced:
            _reduce_gradients(self.engine)
        self._has_gradients = self._is_reduced = False
        self.engine.step()


def _reduce_gradients(engine: Any) -> None:
    """Make gradients ready for a step that came after a forward pass without a backward pass of its own."""
    engine.set_gradient_accumulation_boundary(is_boundary=True)
    if not engine.zero_optimization_partition_gradients():
        engine.allreduce_gradients()
    elif hasattr(engine.optimizer, "finalize_gradient_accumulation_boundary"):
        engine.optimizer.finalize_gradient_accumulation_boundary()


def _forget_gradients(engine: Any) -> None:
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


def _clips_between_steps() -> UserError:
    return UserError(
        "script-clips-between-steps",
        "the script clips gradients without a step, which DeepSpeed can't",
        found="clip_grad_norm_() and another pass of training, with no optimizer.step() between",
        why="DeepSpeed knows the gradients' norm in its step only; zerofit takes it where the script clips",
        fix="clip only right before optimizer.step(), or use --engine native",
        see="https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation",
    )
