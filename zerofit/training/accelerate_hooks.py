"""Hooks into accelerate: process group on the CPU, precision, accumulation, DeepSpeed configuration."""

from __future__ import annotations

import functools
import inspect
from types import MethodType
from typing import TYPE_CHECKING, Any

from zerofit.configs.write.command import MIXED_PRECISION
from zerofit.core.errors import UserError
from zerofit.models.changes.kernels import set_tf32
from zerofit.training import schedulers
from zerofit.training.deepspeed import deepspeed_step, state_overrides
from zerofit.training.deepspeed.window_weights import WindowWeights
from zerofit.training.optimizer_swap import is_plain_optimizer
from zerofit.training.settings import check_batch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from zerofit.training.changes import Changes
    from zerofit.training.settings import Settings


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


def install(accelerator_class: Any, settings: Settings, changes: Changes) -> None:
    """Hook Accelerator so that scripts with a loop of their own train as the plan says.

    Args:
        accelerator_class: accelerate's Accelerator, or a subclass.
        settings: what to set.
        changes: where to note what was changed.
    """
    _hook_init(accelerator_class, settings, changes)
    _hook_prepare(accelerator_class, settings, changes)
    if (settings.forced_accumulation or 1) > 1:
        _hook_accumulation(accelerator_class, settings.forced_accumulation)
        _hook_steps(accelerator_class)
    if settings.forced_accumulation is not None:
        _keep_accumulation(accelerator_class, settings.forced_accumulation, changes)


def _hook_init(accelerator_class: Any, settings: Settings, changes: Changes) -> None:
    original = accelerator_class.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        arguments = signature.bind(self, *args, **kwargs).arguments
        # Trainer has its settings from TrainingArguments, and counts accumulation by itself.
        self._zerofit_by_script = not _is_called_by_trainer()
        if self._zerofit_by_script:
            _set_precision(arguments, settings, changes)
            if settings.forced_accumulation is not None:
                _set_accumulation(arguments, settings.forced_accumulation, changes)
                self._zerofit_weights = WindowWeights(self, changes)
            _set_deepspeed(arguments, settings, changes)
        original(**arguments)
        set_number_formats(settings, changes)

    accelerator_class.__init__ = init


def set_number_formats(settings: Settings, changes: Changes) -> None:
    """Set tf32 as the plan says.

    To be called after accelerate, which allows it beside torch.compile (accelerate/state.py).
    """
    if settings.tf32 is not None:
        for note in set_tf32(settings.tf32):
            changes.add(note)


def _is_called_by_trainer() -> bool:
    """Return whether an Accelerator is being made by transformers' Trainer."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "transformers.trainer":
            return True
        frame = frame.f_back
    return False


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
        changes.add(f"mixed precision is {wanted}, as the plan says; the script says {own}")
        arguments["mixed_precision"] = wanted


def _set_accumulation(arguments: dict[str, Any], steps: int, changes: Changes) -> None:
    """Set the plan's accumulation."""
    plugin = arguments.get("gradient_accumulation_plugin")
    own = plugin.num_steps if plugin is not None else arguments.get("gradient_accumulation_steps", 1)
    if own == steps:
        return
    changes.add(
        f"gradient accumulation is {steps} steps; the script says {own}, and if it counts its steps with that"
        " number, it needs the new one too"
    )
    if plugin is not None:
        plugin.num_steps = steps
    else:
        arguments["gradient_accumulation_steps"] = steps


def _set_deepspeed(arguments: dict[str, Any], settings: Settings, changes: Changes) -> None:
    for name in ("deepspeed_plugin", "deepspeed_plugins"):
        if settings.uses_deepspeed and arguments.pop(name, None) is not None:
            changes.add("DeepSpeed is configured as the plan says; the script brings a DeepSpeedPlugin")


def _hook_prepare(accelerator_class: Any, settings: Settings, changes: Changes) -> None:
    original = accelerator_class.prepare

    @functools.wraps(original)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch_size = _training_batch_size(self, args)
        if self._zerofit_by_script and batch_size is not None and not hasattr(self, "_zerofit_batch_size"):
            # A later one is of other data, which need not fill the plan's batches.
            self._zerofit_batch_size = batch_size
            check_batch(
                settings,
                batch_size=batch_size,
                accumulation=self.gradient_accumulation_steps,
                num_ranks=self.num_processes,
            )
        plugin = getattr(self.state, "deepspeed_plugin", None)
        if plugin is None:
            return original(self, *args, **kwargs)
        _fill_auto(self, plugin.hf_ds_config.config, settings, args)
        schedulers.drop_empty_groups(args)
        state_overrides.keep_overrides(args, changes)
        prepared = original(self, *args, **kwargs)
        schedulers.lead_to_live_optimizers(self._optimizers)
        deepspeed_step.watch(self, changes)
        window = deepspeed_step.window_of(self)
        if window is not None:
            for optimizer in filter(is_plain_optimizer, args):
                deepspeed_step.refuse_step_of(optimizer, window)
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
        sizes = [_batch_sizes(accelerator, objects, shuffled=shuffled) for shuffled in (True, False)]
        config["train_micro_batch_size_per_gpu"] = next((some[0] for some in sizes if some), 1)


def _training_batch_size(accelerator: Any, objects: tuple[Any, ...]) -> int | None:
    """Return the samples per rank of the DataLoader that surely trains, the largest; None without.

    It is one that shuffles, or the only one beside an optimizer.
    """
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    num_loaders = sum(isinstance(item, DataLoader) for item in objects)
    is_only_one = num_loaders == 1 and any(isinstance(item, Optimizer) for item in objects)
    return max(_batch_sizes(accelerator, objects, shuffled=not is_only_one), default=None)


def _batch_sizes(accelerator: Any, objects: tuple[Any, ...], *, shuffled: bool) -> list[int]:
    """Return the samples per rank of all DataLoaders, or of all that shuffle."""
    from torch.utils.data import DataLoader, RandomSampler

    ranks = accelerator.num_processes if accelerator.split_batches else 1
    return [
        max(1, int(loader.batch_size) // ranks)
        for loader in objects
        if isinstance(loader, DataLoader)
        and loader.batch_size
        and (isinstance(loader.sampler, RandomSampler) or not shuffled)
    ]


def _hook_accumulation(accelerator_class: Any, steps: int | None) -> None:
    """Refuse a script that never accumulates: its global batch would silently be smaller than asked for."""
    original_accumulate = accelerator_class.accumulate
    original_backward = accelerator_class.backward

    @functools.wraps(original_accumulate)
    def accumulate(self: Any, *models: Any) -> Any:
        self._zerofit_accumulates = True
        if (weights := getattr(self, "_zerofit_weights", None)) is not None:
            weights.begin_batch()
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


def _hook_steps(accelerator_class: Any) -> None:
    """Let the weights of a window be known before a script clips its gradients or steps."""
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        original_clip = getattr(accelerator_class, name)

        @functools.wraps(original_clip)
        def clip(self: Any, *args: Any, original: Any = original_clip, **kwargs: Any) -> Any:
            if (weights := getattr(self, "_zerofit_weights", None)) is not None:
                weights.before_step()
            return original(self, *args, **kwargs)

        setattr(accelerator_class, name, clip)
    original = accelerator_class.prepare_optimizer

    @functools.wraps(original)
    def prepare_optimizer(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = original(self, optimizer, *args, **kwargs)
        weights = getattr(self, "_zerofit_weights", None)
        if weights is not None and "_zerofit_weighs" not in vars(prepared):
            prepared._zerofit_weighs = True
            # A bound method: a scheduler made of the wrapper later reads the function behind its step().
            prepared.step = MethodType(_after(weights.before_step, type(prepared).step), prepared)
        return prepared

    accelerator_class.prepare_optimizer = prepare_optimizer


def _after(act: Callable[[], None], step: Any) -> Any:
    """Return an optimizer's step() that comes after something else."""

    @functools.wraps(step)
    def after(self: Any, *args: Any, **kwargs: Any) -> Any:
        act()
        return step(self, *args, **kwargs)

    return after


def _keep_accumulation(accelerator_class: Any, steps: int, changes: Changes) -> None:
    """Let a script's later setting of the accumulation give way to the plan's, as that of the start does."""
    own = accelerator_class.gradient_accumulation_steps

    def change(self: Any, value: int) -> None:
        if self._zerofit_by_script and value != steps:
            changes.add(f"gradient accumulation stays {steps} steps; the script sets it to {value} later")
            value = steps
        own.fset(self, value)

    accelerator_class.gradient_accumulation_steps = property(own.fget, change, doc=own.__doc__)
