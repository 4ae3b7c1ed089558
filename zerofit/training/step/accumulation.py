"""Gradient accumulation that the plan sets: the script has to accumulate, and can't change the number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.training.wrapping import around_steps

if TYPE_CHECKING:
    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper


def required_wrappers(
    accelerator_class: Any, settings: AppliedSettings, changes: Changes
) -> dict[str, Wrapper]:
    """Refuse a script that never accumulates, since its global batch size would be smaller than requested."""
    steps = settings.forced_accumulation
    if (steps or 1) == 1:
        return {}

    def accumulate(original: Any, self: Any, *models: Any) -> Any:
        self._zerofit_accumulates = True
        if (weights := getattr(self, "_zerofit_weights", None)) is not None:
            weights.begin_batch()
        return original(self, *models)

    def backward(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        if self._zerofit_by_script and not getattr(self, "_zerofit_accumulates", False):
            raise UserError(
                "script-does-not-accumulate",
                "the script can't accumulate gradients",
                found=f"accumulation of {steps} steps, and backward() outside accelerator.accumulate()",
                why="outside it every micro-batch is a separate step, with gradients divided by the steps",
                fix="put the training step into `with accelerator.accumulate(model):`, or omit the flag",
                see="https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation",
            )
        original(self, *args, **kwargs)

    return {"accumulate": accumulate, "backward": backward}


def weight_wrappers(
    accelerator_class: Any, settings: AppliedSettings, changes: Changes
) -> dict[str, Wrapper]:
    """Complete the weighting of a window before a script clips gradients or steps."""
    if (settings.forced_accumulation or 1) == 1:
        return {}

    def clip(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if has_weights(self):
            self._zerofit_weights.before_step()
        return original(self, *args, **kwargs)

    def step(self: Any, _: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._zerofit_weights.before_step()
        return original(*args, **kwargs)

    def has_weights(accelerator: Any, _: Any = None) -> bool:
        return hasattr(accelerator, "_zerofit_weights")

    return {
        "clip_grad_norm_": clip,
        "clip_grad_value_": clip,
        "prepare_optimizer": around_steps("_zerofit_weighs", step, only=has_weights),
    }


def install_kept(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> None:
    """Make the plan's accumulation override later changes by the script."""
    steps = settings.forced_accumulation
    own = accelerator_class.gradient_accumulation_steps

    def change(self: Any, value: int) -> None:
        is_other = self._zerofit_by_script and value != steps
        if is_other:
            changes.add(f"gradient accumulation stays {steps} steps; the script sets it to {value} later")
        own.fset(self, steps if is_other else value)

    if steps is not None:
        accelerator_class.gradient_accumulation_steps = property(own.fget, change, doc=own.__doc__)
