"""The window of one DeepSpeed engine between two optimizer steps: which call steps it, and when.

accelerate runs DeepSpeed's whole optimizer step inside `backward`, so that gradients accumulated by hand
become steps of their own and a later `clip_grad_norm_` comes too late. Here the last backward pass waits
until it is known whether it ends the window: the script clips or steps, or goes on with another forward pass.
"""

from __future__ import annotations

import functools
from enum import Enum
from typing import TYPE_CHECKING, Any

from zerofit.core.upstream import deepspeed as deepspeed_engine
from zerofit.training.deepspeed import deepspeed_refusals
from zerofit.training.step_calls import script_clips, script_steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerofit.training.changes import Changes


class _Clipped(Enum):
    """State of a step that clipping has taken before the script asked for it."""

    NONE = "none"
    STEPPED = "stepped"
    SKIPPED = "skipped"
    """Its gradients overflowed (inf or NaN)."""


_MOST_DROPPED = 8
"""ASSUMPTION: no script drops the gradients of so many windows before its first step."""


class Window:
    """The backward passes of one engine between two steps of its optimizer.

    Args:
        engine: a DeepSpeedEngine.
        gradient_state: accelerate's GradientState.
        changes: where to note what was changed.
        settle: takes back early backward passes (PendingBackward.settle), but for that of the loss given.
    """

    def __init__(
        self, engine: Any, gradient_state: Any, changes: Changes, *, settle: Callable[[Any], None]
    ) -> None:
        self.engine = engine
        self._gradient_state = gradient_state
        self._changes = changes
        self._settle = settle
        self._waiting: tuple[Callable[[bool], None], Any] | None = None
        """The last backward pass and its loss."""
        self._has_gradients = False
        """True if a backward pass has run since the last step."""
        self._is_reduced = False
        """True if the last backward pass that ran was the window's last one."""
        self._clipped = _Clipped.NONE
        self._script_steps: bool | None = None
        """True if the script steps its optimizer under DeepSpeed; None while that is unknown."""
        self._has_stepped_unasked = False
        """True if a step was taken that the script did not ask for."""
        self.is_stepping = False
        """True if the engine is stepping its optimizer now."""
        self._has_stepped = False
        """True if any step was taken."""
        self._num_dropped = 0
        """Windows whose gradients the script dropped before any step."""
        self.gradient_factor = 1.0
        """The factor of the window's gradients before its step; see window_weights.py."""

    def wait(self, run: Callable[[bool], None], *, loss: Any = None) -> None:
        """Let a backward pass wait for what the script does next; it runs now where accelerate is to step."""
        self.go_on()
        self._waiting = (run, loss)
        if not self.script_steps and not self._script_clips:
            self._step_at_boundary()

    def run(self, backward: Callable[[bool], None], *, is_boundary: bool, loss: Any = None) -> None:
        """Run a backward pass now; it takes whether it is the window's last one, before a step."""
        self._waiting = None
        if is_boundary:
            self._settle(loss)
        if self._has_gradients:
            deepspeed_engine.expect_another_backward(self.engine)
        self.engine.set_gradient_accumulation_boundary(is_boundary=is_boundary)
        backward(is_boundary)
        self._has_gradients, self._is_reduced = True, is_boundary

    def begin_own_backward(self) -> None:
        """Act on the script's own loss.backward(): whether it ends the window shows later."""
        if self._has_gradients:
            deepspeed_engine.expect_another_backward(self.engine)
        self.engine.set_gradient_accumulation_boundary(is_boundary=False)
        self._has_gradients, self._is_reduced = True, False

    def go_on(self) -> None:
        """Act on another pass of training: the script's own step has come, or does not come now."""
        if self._clipped is not _Clipped.NONE:
            if self.script_steps and self._clipped is _Clipped.STEPPED:
                raise deepspeed_refusals.clips_between_steps()
            self._clipped = _Clipped.NONE
        if not self.script_steps:
            self._step_at_boundary()
        elif self._waiting is not None:
            self.run(self._waiting[0], is_boundary=False, loss=self._waiting[1])

    def step(self) -> None:
        """Act on the script's optimizer.step()."""
        if not self._gradient_state.sync_gradients:
            return
        if self._has_stepped_unasked:
            raise deepspeed_refusals.steps_after_all()
        self._script_steps = True
        if self._clipped is _Clipped.NONE:
            self._finish()
        self._clipped = _Clipped.NONE

    def clip(self, max_norm: float, *, norm_type: float) -> Any:
        """Take the step with its gradients clipped, this once: only the step knows their norm.

        Returns:
            The norm, a tensor; not finite where the step was skipped for that; 0 where nothing was clipped.
        """
        import torch

        if float(norm_type) != 2:
            self._changes.add(
                f"gradients are clipped by their 2-norm, the only one DeepSpeed has, not {float(norm_type):g}"
            )
        if not self._gradient_state.sync_gradients:
            self._changes.add("gradients are clipped when they are whole, not in each pass of accumulation")
        elif self._waiting or self._has_gradients:
            with deepspeed_engine.clipping_to(self.engine, max_norm):
                self._finish()
            norm = deepspeed_engine.norm_of_last_step(self.engine)
            self._clipped = _Clipped.STEPPED if torch.isfinite(norm) else _Clipped.SKIPPED
            return norm
        return torch.zeros((), device=deepspeed_engine.device_of(self.engine))

    def zero_grad(self) -> None:
        """Act on the script's optimizer.zero_grad(): gradients that no step has used are lost."""
        if not self._gradient_state.sync_gradients:
            return
        if self._clipped is _Clipped.STEPPED and self.script_steps:
            raise deepspeed_refusals.drops_a_clipped_step()
        self._clipped = _Clipped.NONE
        if (self._waiting or self._has_gradients) and self.script_steps:
            self._num_dropped += not self._has_stepped
            if self._num_dropped == _MOST_DROPPED:
                raise deepspeed_refusals.never_steps()
            self._waiting = None
            self._settle(None)
            if self._has_gradients:
                deepspeed_engine.forget_gradients(self.engine)
            self._has_gradients = self._is_reduced = False

    def end(self) -> None:
        """Act on the script's looking at its weights: only a step that it leaves to accelerate is due."""
        if not self.script_steps:
            self._step_at_boundary()

    def close(self) -> None:
        """Act on the end of training: gradients without any step are an error."""
        self.end()
        if (self._waiting or self._has_gradients or self._num_dropped) and not self._has_stepped:
            raise deepspeed_refusals.never_steps()

    @property
    def script_steps(self) -> bool:
        """True if the script steps its optimizer itself; some leave that to accelerate."""
        if self._script_steps is None:
            if not (self._waiting or self._has_gradients or self._clipped is not _Clipped.NONE):
                return True  # nothing to decide yet
            self._script_steps = script_steps()
        return self._script_steps

    @functools.cached_property
    def _script_clips(self) -> bool:
        """True if the script may clip after backward: a step that it leaves to accelerate waits for that."""
        return script_clips()

    def _step_at_boundary(self) -> None:
        """Take the step that stock accelerate takes inside backward()."""
        if self._waiting is not None:
            self._has_stepped_unasked = True
            self._finish()
        elif self._is_reduced:
            self._finish()

    def _finish(self) -> None:
        """End the window: its last backward pass, if that waits, and the step."""
        if self._waiting is not None:
            self.run(self._waiting[0], is_boundary=True, loss=self._waiting[1])
        if not self._has_gradients:
            return
        if not self._is_reduced:
            self._settle(None)
            deepspeed_engine.reduce_gradients(self.engine)
        self._has_gradients = self._is_reduced = False
        self.is_stepping = self._has_stepped = True
        try:
            with deepspeed_engine.multiplying_gradients(self.engine, self.gradient_factor):
                self.engine.step()
        finally:
            self.is_stepping, self.gradient_factor = False, 1.0
