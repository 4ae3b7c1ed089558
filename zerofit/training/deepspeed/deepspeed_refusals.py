"""Refusals of what a script does to its gradients and steps, and DeepSpeed can't."""

from __future__ import annotations

from functools import partial

from zerofit.core.errors import UserError

_LOOPS = "https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation"
_DEEPSPEED = "https://huggingface.co/docs/accelerate/usage_guides/deepspeed"

clips_between_steps = partial(
    UserError,
    "script-clips-between-steps",
    "the script clips gradients without a step, which DeepSpeed can't",
    found="clip_grad_norm_() and another pass of training, with no optimizer.step() between",
    why="DeepSpeed knows the gradients' norm in its step only; zerofit takes it where the script clips",
    fix="clip only right before optimizer.step(), or use --engine native",
    see=_LOOPS,
)
drops_a_clipped_step = partial(
    UserError,
    "script-drops-a-clipped-step",
    "the script drops gradients that it has clipped, which DeepSpeed can't",
    found="clip_grad_norm_() with a finite norm, and optimizer.zero_grad() in place of step()",
    why="DeepSpeed knows the gradients' norm in its step only; zerofit takes it where the script clips, "
    "and skips it only where the norm is inf or NaN",
    fix="take the step after every clip_grad_norm_(), or use --engine native",
    see=_DEEPSPEED,
)
steps_after_all = partial(
    UserError,
    "step-seen-too-late",
    "the script steps its optimizer where zerofit did not see it",
    found="optimizer.step(), after steps that were taken for a script that leaves them to accelerate",
    why="no call of optimizer.step() was found in the script's source, so every pass became a step",
    fix="call optimizer.step() in a source file of the script, or use --engine native",
    see=_DEEPSPEED,
)
never_steps = partial(
    UserError,
    "optimizer-never-steps",
    "the script computes gradients and never steps its optimizer",
    found="backward passes, and no optimizer.step() so far",
    why="its source calls a step(), so that the steps are its own; accelerate's, one in each backward(), "
    "zerofit takes only for scripts without any",
    fix="call optimizer.step() under DeepSpeed too, or use --engine native",
    see=_DEEPSPEED,
)
steps_unprepared_optimizer = partial(
    UserError,
    "optimizer-not-prepared",
    "DeepSpeed steps only an optimizer that is prepared",
    found="step() of an optimizer as the script made it",
    why="its gradients are DeepSpeed's, which averages them over the ranks when its own optimizer steps",
    fix="step what accelerator.prepare(optimizer) returns, or use --engine native",
    see=_DEEPSPEED,
)
trains_without_optimizer = partial(
    UserError,
    "optimizer-not-prepared",
    "DeepSpeed trains only a model whose optimizer is prepared",
    found="a forward pass for training, of a model that was prepared without its optimizer",
    why="ZeRO partitions both together, and without it no gradient is averaged over the ranks",
    fix="prepare the optimizer with its model, before it trains, or use --engine native",
    see=_DEEPSPEED,
)
clips_by_value = partial(
    UserError,
    "deepspeed-clips-by-norm-only",
    "DeepSpeed can't clip gradients by their values",
    found="clip_grad_value_() under DeepSpeed",
    why="the gradients are partitioned over the ranks, and DeepSpeed clips their common norm only",
    fix="use accelerator.clip_grad_norm_() in the script, or --engine native",
    see=_DEEPSPEED,
)
