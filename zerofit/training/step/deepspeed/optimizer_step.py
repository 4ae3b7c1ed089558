"""Makes DeepSpeed step where the script steps, and before anything reads the weights.

accelerate runs DeepSpeed's whole optimizer step inside `backward`, so that manual accumulation becomes
separate steps and a later `clip_grad_norm_` comes too late. Here the last backward pass is delayed until it
is known whether it ends the accumulation window: the script clips or steps, or runs another forward pass.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from enum import Enum
from functools import cached_property, partial
from types import MethodType
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.upstream import deepspeed as deepspeed_engine
from zerofit.core.upstream.accelerate import prepared_models, prepared_optimizers, prepared_schedulers
from zerofit.core.upstream.deepspeed import hook_own_backward
from zerofit.training.batch.micro_batches.hooks import settle
from zerofit.training.step.deepspeed import guard
from zerofit.training.step.skipped_steps import watch_engine
from zerofit.training.step.step_calls import script_clips, script_steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper

_LOOPS = "https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation"
_DEEPSPEED = "https://huggingface.co/docs/accelerate/usage_guides/deepspeed"

clips_between_steps = partial(
    UserError,
    "script-clips-between-steps",
    "the script clips gradients without a step, which DeepSpeed doesn't support",
    found="clip_grad_norm_() and another training pass, without optimizer.step() in between",
    why="DeepSpeed only knows the gradient norm in its step, which zerofit runs where the script clips",
    fix="clip only right before optimizer.step(), or use --engine native",
    see=_LOOPS,
)
drops_a_clipped_step = partial(
    UserError,
    "script-drops-a-clipped-step",
    "the script discards clipped gradients, which DeepSpeed doesn't support",
    found="clip_grad_norm_() with a finite norm, and optimizer.zero_grad() instead of step()",
    why="DeepSpeed only knows the gradient norm in its step, which zerofit runs where the script clips, "
    "and only skips if the norm is inf or NaN",
    fix="call step() after every clip_grad_norm_(), or use --engine native",
    see=_DEEPSPEED,
)
steps_after_all = partial(
    UserError,
    "step-seen-too-late",
    "the script steps its optimizer, which zerofit did not expect",
    found="optimizer.step(), after steps inside backward(), as for scripts that leave them to accelerate",
    why="no call of optimizer.step() was found in the script's source, so every pass became a step",
    fix="call optimizer.step() in a source file of the script, or use --engine native",
    see=_DEEPSPEED,
)
never_steps = partial(
    UserError,
    "optimizer-never-steps",
    "the script computes gradients and never steps its optimizer",
    found="backward passes, and no optimizer.step() so far",
    why="its source calls step(), so zerofit waits for it; only for scripts without any does each "
    "backward() include a step, as in accelerate",
    fix="also call optimizer.step() under DeepSpeed, or use --engine native",
    see=_DEEPSPEED,
)
steps_unprepared_optimizer = partial(
    UserError,
    "optimizer-not-prepared",
    "DeepSpeed can only step a prepared optimizer",
    found="step() of the script's unprepared optimizer",
    why="DeepSpeed holds the gradients, and averages them over the ranks when its own optimizer steps",
    fix="step what accelerator.prepare(optimizer) returns, or use --engine native",
    see=_DEEPSPEED,
)
trains_without_optimizer = partial(
    UserError,
    "optimizer-not-prepared",
    "DeepSpeed can only train a model whose optimizer is prepared",
    found="a training forward pass of a model that was prepared without its optimizer",
    why="ZeRO partitions both together, and without the optimizer gradients are not averaged over the ranks",
    fix="prepare the optimizer with its model before training, or use --engine native",
    see=_DEEPSPEED,
)
clips_by_value = partial(
    UserError,
    "deepspeed-clips-by-norm-only",
    "DeepSpeed can't clip gradients by value",
    found="clip_grad_value_() under DeepSpeed",
    why="gradients are partitioned over the ranks, and DeepSpeed only clips by their global norm",
    fix="use accelerator.clip_grad_norm_() in the script, or --engine native",
    see=_DEEPSPEED,
)


class _Clipped(Enum):
    """Whether clipping has already run the step."""

    NONE = "none"
    STEPPED = "stepped"
    SKIPPED = "skipped"
    """The step was skipped, since gradients overflowed (inf or NaN)."""


_MAX_DISCARDED_WINDOWS = 8
"""ASSUMPTION: no script discards the gradients of this many windows before its first step."""


class Window:
    """The backward passes of one engine between two optimizer steps.

    Args:
        engine: a DeepSpeedEngine.
        gradient_state: accelerate's GradientState.
        changes: receives changes.
        settle: undoes early backward passes (PendingBackward.settle), except that of the given loss.
    """

    def __init__(
        self, engine: Any, gradient_state: Any, changes: Changes, *, settle: Callable[[Any], None]
    ) -> None:
        self.engine = engine
        self._gradient_state = gradient_state
        self._changes = changes
        self._settle = settle
        self._delayed: tuple[Callable[[bool], None], Any] | None = None
        """The delayed backward pass and its loss."""
        self._has_gradients = False
        """True if a backward pass has run since the last step."""
        self._is_reduced = False
        """True if the last backward pass ran as the window's last one, which reduces gradients."""
        self._clipped = _Clipped.NONE
        self._script_steps: bool | None = None
        """True if the script steps its optimizer under DeepSpeed; None while unknown."""
        self._has_stepped_in_backward = False
        """True if a step was run for a script that leaves its steps to accelerate."""
        self.is_stepping = False
        """True while the engine steps its optimizer."""
        self._has_stepped = False
        """True after the first step."""
        self._num_discarded = 0
        """Windows whose gradients the script discarded before its first step."""
        self.gradient_factor = 1.0
        """The factor for the window's gradients before its step; see window_weights.py."""

    def delay(self, run: Callable[[bool], None], *, loss: Any = None) -> None:
        """Delay a backward pass until the script's next action; it runs now if accelerate steps."""
        self.before_training_pass()
        self._begin_backward()
        self._delayed = (run, loss)
        if not self.script_steps and not self._script_clips:
            self._step_at_boundary()

    def run(self, backward: Callable[[bool], None], *, is_boundary: bool, loss: Any = None) -> None:
        """Run a backward pass now, given whether it is the window's last one before a step."""
        self._delayed = None
        self._begin_backward()
        if is_boundary:
            self._settle(loss)
        if self._has_gradients:
            deepspeed_engine.expect_another_backward(self.engine)
        self.engine.set_gradient_accumulation_boundary(is_boundary=is_boundary)
        backward(is_boundary)
        self._has_gradients, self._is_reduced = True, is_boundary

    def begin_own_backward(self) -> None:
        """Handle the script's own loss.backward(); whether it ends the window is decided later."""
        self._begin_backward()
        if self._has_gradients:
            deepspeed_engine.expect_another_backward(self.engine)
        self.engine.set_gradient_accumulation_boundary(is_boundary=False)
        self._has_gradients, self._is_reduced = True, False

    def _begin_backward(self) -> None:
        if (own := guard.guard_of(self.engine)) is not None:
            own.begin_backward()

    def before_training_pass(self) -> None:
        """Handle the start of a training pass, before which the script may have stepped."""
        if self._clipped is not _Clipped.NONE:
            if self.script_steps and self._clipped is _Clipped.STEPPED:
                raise clips_between_steps()
            self._clipped = _Clipped.NONE
        if not self.script_steps:
            self._step_at_boundary()
        elif self._delayed is not None:
            self.run(self._delayed[0], is_boundary=False, loss=self._delayed[1])

    def step(self) -> None:
        """Handle the script's optimizer.step()."""
        if not self._gradient_state.sync_gradients:
            return
        if self._has_stepped_in_backward:
            raise steps_after_all()
        self._script_steps = True
        if self._clipped is _Clipped.NONE:
            self._finish()
        self._clipped = _Clipped.NONE

    def clip(self, max_norm: float, *, norm_type: float) -> Any:
        """Run the step with clipped gradients, since only the step knows their norm.

        Returns:
            The norm, a tensor: inf or NaN if the step was skipped; 0 if nothing was clipped.
        """
        import torch

        if float(norm_type) != 2:
            self._changes.add(
                f"gradients are clipped by their 2-norm, the only one DeepSpeed has, not {float(norm_type):g}"
            )
        if not self._gradient_state.sync_gradients:
            self._changes.add("gradients are clipped once per step, not in each pass of accumulation")
        elif self._delayed or self._has_gradients:
            with deepspeed_engine.clipping_to(self.engine, max_norm):
                self._finish()
            norm = deepspeed_engine.norm_of_last_step(self.engine)
            self._clipped = _Clipped.STEPPED if torch.isfinite(norm) else _Clipped.SKIPPED
            return norm
        return torch.zeros((), device=deepspeed_engine.device_of(self.engine))

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Handle the script's optimizer.zero_grad(), which discards unused gradients."""
        if not self._gradient_state.sync_gradients:
            return
        if (own := guard.guard_of(self.engine)) is not None:
            own.zero_grad(set_to_none=set_to_none)
        if self._clipped is _Clipped.STEPPED and self.script_steps:
            raise drops_a_clipped_step()
        self._clipped = _Clipped.NONE
        if (self._delayed or self._has_gradients) and self.script_steps:
            self._num_discarded += not self._has_stepped
            if self._num_discarded == _MAX_DISCARDED_WINDOWS:
                raise never_steps()
            self._delayed = None
            self._settle(None)
            if self._has_gradients:
                deepspeed_engine.forget_gradients(self.engine)
            self._has_gradients = self._is_reduced = False

    def run_due_step(self) -> None:
        """Run a step that the script leaves to accelerate, before the script reads its weights."""
        if not self.script_steps:
            self._step_at_boundary()

    def close(self) -> None:
        """Handle the end of training: gradients without any step are an error."""
        self.run_due_step()
        if (self._delayed or self._has_gradients or self._num_discarded) and not self._has_stepped:
            raise never_steps()

    @property
    def script_steps(self) -> bool:
        """True if the script steps its optimizer itself; some leave that to accelerate."""
        if self._script_steps is None:
            if not (self._delayed or self._has_gradients or self._clipped is not _Clipped.NONE):
                return True  # nothing to decide yet
            self._script_steps = script_steps()
        return self._script_steps

    @cached_property
    def _script_clips(self) -> bool:
        """True if the script may clip after backward, which delays the step."""
        return script_clips()

    def _step_at_boundary(self) -> None:
        """Run the step that stock accelerate runs inside backward()."""
        if self._delayed is not None:
            self._has_stepped_in_backward = True
            self._finish()
        elif self._is_reduced:
            self._finish()

    def _finish(self) -> None:
        """End the window: run its last backward pass, if delayed, and the step."""
        if self._delayed is not None:
            self.run(self._delayed[0], is_boundary=True, loss=self._delayed[1])
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


def window_of(accelerator: Any) -> Window | None:
    """Return the window of an Accelerator's engine; None without DeepSpeed."""
    wrapped = getattr(accelerator, "deepspeed_engine_wrapped", None)
    return None if wrapped is None else wrapped.engine.__dict__.get("_zerofit_window")


def watch(accelerator: Any, own: guard.OwnOptimizers, changes: Changes) -> None:
    """Make the engines and optimizers prepared by an Accelerator step where the script steps.

    Args:
        accelerator: whose objects are prepared now.
        own: the script's optimizers, and the parameters of their groups before DeepSpeed was set up.
        changes: receives changes.
    """
    for engine in prepared_models(accelerator):
        if hasattr(engine, "set_gradient_accumulation_boundary") and "_zerofit_window" not in engine.__dict__:
            _watch_engine(engine, accelerator, changes)
            guard.watch(engine, own, changes)
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
            # Bound methods: a scheduler created from the wrapper later reads the function behind its step().
            wrapper.step = MethodType(_step, wrapper)
            wrapper.zero_grad = MethodType(_zero_grad, wrapper)


def refuse_step_of(optimizer: Any, window: Window) -> None:
    """Refuse step() of the script's unprepared optimizer, which only DeepSpeed may call."""

    def check(*_: Any) -> None:
        if not window.is_stepping:
            raise steps_unprepared_optimizer()

    optimizer.register_step_pre_hook(check)


def _before_forward(engine: Any, _: Any) -> None:
    import torch

    if engine.training and torch.is_grad_enabled():
        engine._zerofit_window.before_training_pass()
    else:
        engine._zerofit_window.run_due_step()


def _step(optimizer: Any, closure: Any = None) -> None:
    optimizer._zerofit_window.step()


def _zero_grad(optimizer: Any, set_to_none: bool | None = None) -> None:
    optimizer._zerofit_window.zero_grad(set_to_none=set_to_none is not False)


def _after_step_of(accelerator: Any, original: Any) -> Any:
    """Return a scheduler's step() that first runs a step left to accelerate."""
    held = weakref.ref(accelerator)

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        window = window_of(held())
        if window is not None:
            window.run_due_step()
        return original(self, *args, **kwargs)

    return step


def wrappers(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Run a step that a script leaves to accelerate before the script saves, evaluates or ends."""
    if not settings.uses_deepspeed:
        return {}

    def after(act: Callable[[Window], None], original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        window = window_of(self)
        if window is not None:
            act(window)
        return original(self, *args, **kwargs)

    readers = ("save_state", "save_model", "get_state_dict", "unwrap_model")
    after_due_step = functools.partial(after, Window.run_due_step)
    return {**dict.fromkeys(readers, after_due_step), "end_training": functools.partial(after, Window.close)}


def hide_renamed_collectives() -> None:
    """Hide the warnings of collectives that torch 2.13 renamed.

    DeepSpeed 0.19 calls them, thousands of times; no script can fix that.
    """
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
