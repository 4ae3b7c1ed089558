"""Hooks into accelerate: rank and world size on the CPU, precision, accumulation, clipping."""

from __future__ import annotations

import functools
import inspect
import math
from typing import TYPE_CHECKING, Any

from zerofit.errors import UserError
from zerofit.render.command import MIXED_PRECISION
from zerofit.runtime import deepspeed_step, schedulers

if TYPE_CHECKING:
    from types import ModuleType

    from zerofit.runtime.changes import Changes
    from zerofit.runtime.settings import Settings


def default_to_gloo(module: ModuleType) -> None:
    """Give CPU ranks under DeepSpeed a process group.

    Without a backend accelerate 1.15 takes each CPU rank for rank 0 of 1, and every rank reads all the data
    while DeepSpeed partitions over all of them (accelerate/state.py, PartialState).

    Args:
        module: accelerate.state.
    """
    original = module.PartialState.__init__

    @functools.wraps(original)
    def init(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        if not cpu and kwargs.get("backend") is None:
            kwargs["backend"] = "gloo"
        original(self, cpu, **kwargs)

    module.PartialState.__init__ = init


def install(module: ModuleType, settings: Settings, changes: Changes) -> None:
    """Hook Accelerator so that scripts with a loop of their own train as the plan says.

    Args:
        module: accelerate.accelerator.
        settings: what to set.
        changes: where to note what was changed.
    """
    accelerator_class = module.Accelerator
    _hook_init(accelerator_class, settings, changes)
    _hook_prepare(accelerator_class, settings)
    _hook_clipping(module, settings, changes)
    if settings.gradient_accumulation_steps is not None and settings.gradient_accumulation_steps > 1:
        _hook_accumulation(accelerator_class, settings.gradient_accumulation_steps)


def _hook_init(accelerator_class: Any, settings: Settings, changes: Changes) -> None:
    original = accelerator_class.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        arguments = signature.bind(self, *args, **kwargs).arguments
        # Trainer brings a plugin of its own, and has its settings from TrainingArguments.
        by_script = "gradient_accumulation_plugin" not in arguments
        if by_script:
            _set_precision(arguments, settings, changes)
            _set_accumulation(arguments, settings, changes)
        original(**arguments)
        self._zerofit_by_script = by_script

    accelerator_class.__init__ = init


def _set_precision(arguments: dict[str, Any], settings: Settings, changes: Changes) -> None:
    own = arguments.get("mixed_precision")
    if settings.precision is None or own is None:
        return  # the launch command line has set it
    wanted = MIXED_PRECISION[settings.precision]
    if str(own) == wanted:
        return
    if settings.precision_is_default:
        changes.add(f"mixed precision is {own}, as the script says; {wanted} would have been the default")
    else:
        changes.add(f"mixed precision is {wanted}, as --mixed-precision says; the script says {own}")
        arguments["mixed_precision"] = wanted


def _set_accumulation(arguments: dict[str, Any], settings: Settings, changes: Changes) -> None:
    steps = settings.gradient_accumulation_steps
    own = arguments.get("gradient_accumulation_steps", 1)
    if steps is not None and own != steps:
        changes.add(f"gradient accumulation is {steps} steps; the script says {own}")
        arguments["gradient_accumulation_steps"] = steps


def _hook_prepare(accelerator_class: Any, settings: Settings) -> None:
    original = accelerator_class.prepare

    @functools.wraps(original)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        plugin = getattr(self.state, "deepspeed_plugin", None)
        if plugin is not None:
            _fill_auto(self, plugin.hf_ds_config.config, settings, args)
            schedulers.drop_empty_groups(args)
        prepared = original(self, *args, **kwargs)
        if plugin is not None:
            schedulers.lead_to_live_optimizer(self)
        return prepared

    accelerator_class.prepare = prepare


def _fill_auto(
    accelerator: Any, config: dict[str, Any], settings: Settings, objects: tuple[Any, ...]
) -> None:
    """Fill what accelerate would misjudge; in a Trainer script nothing is "auto" any more at this point."""
    if config.get("gradient_clipping") == "auto":
        # accelerate would put 1.0, and clip where nobody asked for it.
        config["gradient_clipping"] = settings.gradient_clipping or 0.0
    if config.get("train_micro_batch_size_per_gpu") == "auto":
        # accelerate would take the smallest of all DataLoaders, and fail without one. DeepSpeed only counts
        # samples with it, so that 1 is no harm where the data comes from elsewhere.
        config["train_micro_batch_size_per_gpu"] = _train_batch_size(accelerator, objects) or 1


def _train_batch_size(accelerator: Any, objects: tuple[Any, ...]) -> int | None:
    from torch.utils.data import DataLoader, RandomSampler

    loaders = [item for item in objects if isinstance(item, DataLoader) and item.batch_size]
    shuffled = [loader for loader in loaders if isinstance(loader.sampler, RandomSampler)]
    for loader in (*shuffled, *loaders):
        ranks = accelerator.num_processes if accelerator.split_batches else 1
        return max(1, int(loader.batch_size) // ranks)
    return None


def _hook_clipping(module: ModuleType, settings: Settings, changes: Changes) -> None:
    accelerator_class = module.Accelerator
    original_clip = accelerator_class.clip_grad_norm_
    forced = settings.gradient_clipping

    @functools.wraps(original_clip)
    def clip(self: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        if forced is not None and forced != max_norm:
            changes.add(f"gradients are clipped to {forced:g} (0 is off); the script says {max_norm:g}")
            max_norm = forced
        self._zerofit_clipped = True
        wrapped = getattr(self, "deepspeed_engine_wrapped", None)
        if wrapped is not None:
            deepspeed_step.clip_and_step(wrapped.engine, max_norm)
        return original_clip(self, parameters, max_norm or math.inf, norm_type)

    accelerator_class.clip_grad_norm_ = clip
    if forced:
        _hook_optimizer_step(module, forced, changes)


def _hook_optimizer_step(module: ModuleType, max_norm: float, changes: Changes) -> None:
    """Clip before each step of a script that does not clip itself; DeepSpeed does so by its configuration."""
    original_backward = module.Accelerator.backward
    original_step = module.AcceleratedOptimizer.step
    accelerators: list[Any] = []

    @functools.wraps(original_backward)
    def backward(self: Any, *args: Any, **kwargs: Any) -> None:
        accelerators[:] = [self]
        self._zerofit_clipped = False
        original_backward(self, *args, **kwargs)

    @functools.wraps(original_step)
    def step(self: Any, closure: Any = None) -> None:
        if accelerators and self.gradient_state.sync_gradients and not accelerators[0]._zerofit_clipped:
            changes.add(f"gradients are clipped to {max_norm:g}; the script does not clip")
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            accelerators[0].clip_grad_norm_(parameters, max_norm)
        original_step(self, closure)

    module.Accelerator.backward = backward
    module.AcceleratedOptimizer.step = step


def _hook_accumulation(accelerator_class: Any, steps: int) -> None:
    """Refuse a script that never accumulates: its global batch would silently be smaller than asked for."""
    original_accumulate = accelerator_class.accumulate
    original_backward = accelerator_class.backward

    @functools.wraps(original_accumulate)
    def accumulate(self: Any, *models: Any) -> Any:
        self._zerofit_accumulates = True
        return original_accumulate(self, *models)

    @functools.wraps(original_backward)
    def backward(self: Any, *args: Any, **kwargs: Any) -> None:
        if self._zerofit_by_script and not getattr(self, "_zerofit_accumulates", False):
            raise UserError(
                "script-does-not-accumulate",
                "the script can't accumulate gradients",
                found=f"accumulation of {steps} steps, and backward() outside accelerator.accumulate()",
                why="outside it every micro-batch is a step of its own, with gradients divided by the steps",
                fix="put the training step into `with accelerator.accumulate(model):`, or leave the flag out",
                see="https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation",
            )
        original_backward(self, *args, **kwargs)

    accelerator_class.accumulate = accumulate
    accelerator_class.backward = backward
