"""Hooks on accelerate: process group on the CPU, precision, accumulation, DeepSpeed configuration."""

from __future__ import annotations

import inspect
import os
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

from zerofit.configs.write.command import MIXED_PRECISION
from zerofit.core.errors import UserError
from zerofit.core.upstream.accelerate import prepared_optimizers
from zerofit.models.changes.kernels import set_tf32
from zerofit.training.settings import check_batch
from zerofit.training.setup.deepspeed import partitioned_models, state_overrides
from zerofit.training.setup.optimizer_swap import is_plain_optimizer
from zerofit.training.step import schedulers
from zerofit.training.step.deepspeed import optimizer_step
from zerofit.training.step.window_weights import WindowWeights
from zerofit.training.wrapping import wrap, wrap_steps

if TYPE_CHECKING:
    from types import ModuleType

    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings


def install_gloo(module: ModuleType, settings: AppliedSettings, changes: Changes) -> None:
    """Create a process group for CPU ranks with DeepSpeed.

    Without a backend accelerate 1.15 treats each CPU rank as rank 0 of 1, and every rank reads all the data
    while DeepSpeed partitions over all of them (accelerate/state.py, PartialState).
    """

    def init(original: Any, self: Any, cpu: bool = False, **kwargs: Any) -> None:
        if not cpu and kwargs.get("backend") is None:
            kwargs["backend"] = "gloo"
        original(self, cpu, **kwargs)

    if settings.uses_deepspeed and settings.on_cpu:
        wrap(module.PartialState, "__init__", init)


def install_arguments(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> None:
    """Hook the constructor: precision, accumulation, DeepSpeed plugin and tf32 as planned."""

    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        arguments = inspect.signature(original).bind(self, *args, **kwargs).arguments
        # Trainer gets its settings from TrainingArguments, and counts accumulation itself.
        self._zerofit_by_script = not _is_called_by_trainer()
        if self._zerofit_by_script:
            _set_precision(arguments, settings, changes)
            if settings.forced_accumulation is not None:
                _set_accumulation(arguments, settings.forced_accumulation, changes)
                self._zerofit_weights = WindowWeights(self, changes)
            if settings.uses_deepspeed and _drop_plugin(arguments):
                changes.add("DeepSpeed is configured as the plan says; the script brings a DeepSpeedPlugin")
            if settings.uses_deepspeed and settings.on_cpu and arguments.pop("cpu", False):
                changes.add("the ranks run on the CPU as the plan says; cpu=True would switch DeepSpeed off")
        if not settings.uses_deepspeed and _drop_plugin(arguments):
            os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)  # the plugin's constructor sets it
            changes.add(
                "PyTorch trains without DeepSpeed as the plan says; the script brings a DeepSpeedPlugin"
            )
        original(**arguments)
        _check_engine(self, settings)
        if self._zerofit_by_script and settings.uses_deepspeed:
            _fill_early(self, settings)
        set_number_formats(settings, changes)

    wrap(accelerator_class, "__init__", init)


def _drop_plugin(arguments: dict[str, Any]) -> bool:
    """Drop the script's DeepSpeedPlugin from an Accelerator's arguments, and return True if it has one."""
    plugins = [arguments.pop(name, None) for name in ("deepspeed_plugin", "deepspeed_plugins")]
    return any(plugin is not None for plugin in plugins)


def _check_engine(accelerator: Any, settings: AppliedSettings) -> None:
    """Check that the Accelerator trains on the engine that the plan and its printed line say.

    Raises:
        UserError: it does not.
    """
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    is_deepspeed = kind == "DEEPSPEED"
    if is_deepspeed == settings.uses_deepspeed and kind not in ("FSDP", "MEGATRON_LM"):
        return
    raise UserError(
        "engine-not-as-planned",
        "the script trains on another engine than the plan says",
        found=f"accelerator.distributed_type is {kind}, and the plan says {settings.strategy.engine.value}",
        why="memory, time and checkpoints of the plan are those of its engine",
        fix="remove what chooses an engine in the script (DeepSpeedPlugin, fsdp_plugin, TrainingArguments' "
        "deepspeed and fsdp), or choose the same for zerofit: --zero-stage N, or --engine native",
    )


def set_number_formats(settings: AppliedSettings, changes: Changes) -> None:
    """Set tf32 as planned.

    To be called after accelerate, which enables it with torch.compile (accelerate/state.py).
    """
    if settings.strategy.tf32 is not None:
        changes.add(*set_tf32(settings.strategy.tf32))


def _is_called_by_trainer() -> bool:
    frames = walk_stack(inspect.currentframe())
    return any(frame.f_globals.get("__name__") == "transformers.trainer" for frame, _ in frames)


def _set_precision(arguments: dict[str, Any], settings: AppliedSettings, changes: Changes) -> None:
    own = arguments.get("mixed_precision")
    if settings.strategy.precision is None or own is None:
        return  # accelerate launch's command line sets it
    wanted = MIXED_PRECISION[settings.strategy.precision]
    if str(own) == wanted:
        return
    if settings.precision_is_default:
        changes.add(f"mixed precision is {own}, as the script says; {wanted} would have been the default")
    else:
        changes.add(f"mixed precision is {wanted}, as the plan says; the script says {own}")
        arguments["mixed_precision"] = wanted


def _set_accumulation(arguments: dict[str, Any], steps: int, changes: Changes) -> None:
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


def install_prepare(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> None:
    """Hook prepare(): check the script's batch size and complete the DeepSpeed configuration."""

    def prepare(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        batch_size = _training_batch_size(self, args, settings)
        if self._zerofit_by_script and batch_size is not None and not hasattr(self, "_zerofit_batch_size"):
            # Later calls may prepare other data, which need not match the plan's batch size.
            self._zerofit_batch_size = batch_size
            check_batch(
                settings,
                batch_size=batch_size,
                accumulation=self.gradient_accumulation_steps,
                num_ranks=_num_readers(self, settings),
            )
        plugin = getattr(self.state, "deepspeed_plugin", None)
        if plugin is None:
            return original(self, *args, **kwargs)
        if plugin.zero_stage == 3 or self.mixed_precision != "no":
            partitioned_models.refuse_own_parameters(args)
        if plugin.zero_stage == 3:
            partitioned_models.refuse_empty_parameters(args)
        _undo_early(plugin)
        _fill_auto(self, plugin.hf_ds_config.config, settings, args)
        schedulers.drop_empty_groups(args)
        state_overrides.keep_overrides(args, changes)
        own = [optimizer for optimizer in args if is_plain_optimizer(optimizer)]
        with_groups = [(one, [list(group["params"]) for group in one.param_groups]) for one in own]
        prepared = original(self, *args, **kwargs)
        schedulers.lead_to_live_optimizers(prepared_optimizers(self))
        optimizer_step.watch(self, with_groups, changes)
        window = optimizer_step.window_of(self)
        if window is not None:
            for optimizer in own:
                optimizer_step.refuse_step_of(optimizer, window)
        return prepared

    wrap(accelerator_class, "prepare", prepare)


def _fill_early(accelerator: Any, settings: AppliedSettings) -> None:
    """Replace "auto" values that are known when the Accelerator is made, for scripts that read them then.

    prepare() decides anew: until then the script may set its accumulation, or one of these values.
    """
    plugin = accelerator.state.deepspeed_plugin
    known = {
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
        "gradient_clipping": settings.strategy.gradient_clipping or 0.0,
        "train_micro_batch_size_per_gpu": _captured_batch_size(settings),
    }
    config = plugin.hf_ds_config.config
    early = {key: value for key, value in known.items() if config.get(key) == "auto" and value is not None}
    config.update(early)
    plugin.zerofit_early = {**getattr(plugin, "zerofit_early", {}), **early}
    if plugin.gradient_accumulation_steps == "auto":
        plugin.gradient_accumulation_steps = accelerator.gradient_accumulation_steps


def _undo_early(plugin: Any) -> None:
    """Make early values "auto" again, except where the script has set others."""
    config = plugin.hf_ds_config.config
    early = getattr(plugin, "zerofit_early", {})
    config.update({key: "auto" for key, value in early.items() if config.get(key) == value})
    plugin.zerofit_early = {}


def _fill_auto(
    accelerator: Any, config: dict[str, Any], settings: AppliedSettings, objects: tuple[Any, ...]
) -> None:
    """Replace "auto" values that accelerate would set wrongly; Trainer has already set its own."""
    if config.get("gradient_clipping") == "auto":
        # accelerate would set 1.0, and clip although nobody requested it.
        config["gradient_clipping"] = settings.strategy.gradient_clipping or 0.0
    if config.get("train_micro_batch_size_per_gpu") == "auto":
        # accelerate would use the smallest of all DataLoaders, and fail without one. DeepSpeed only uses it
        # to count samples, so any number is harmless if the data comes from elsewhere.
        sizes = [_batch_sizes(accelerator, objects, settings, shuffled=one) for one in (True, False)]
        fallback = _captured_batch_size(settings) or 1
        config["train_micro_batch_size_per_gpu"] = next((some[0] for some in sizes if some), fallback)


def _training_batch_size(accelerator: Any, objects: tuple[Any, ...], settings: AppliedSettings) -> int | None:
    """Return the batch size per rank of the training DataLoader; None if it is unknown.

    It is a DataLoader that shuffles, or the only one beside an optimizer. Of several, it is one with the
    captured batch size, since a script may also shuffle its evaluation data, or else the largest.
    """
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    num_loaders = sum(isinstance(item, DataLoader) for item in objects)
    is_only_one = num_loaders == 1 and any(isinstance(item, Optimizer) for item in objects)
    sizes = _batch_sizes(accelerator, objects, settings, shuffled=not is_only_one)
    captured = _captured_batch_size(settings)
    return captured if captured in sizes else max(sizes, default=None)


def _captured_batch_size(settings: AppliedSettings) -> int | None:
    """Return the script's batch size per rank as captured; None without a capture."""
    return settings.plan.capture.micro_batch_size if settings.plan.capture is not None else None


def _batch_sizes(
    accelerator: Any, objects: tuple[Any, ...], settings: AppliedSettings, *, shuffled: bool
) -> list[int]:
    """Return the batch sizes per rank of all DataLoaders, or of those that shuffle."""
    from torch.utils.data import DataLoader, RandomSampler

    ranks = _num_readers(accelerator, settings) if accelerator.split_batches else 1
    return [
        max(1, int(loader.batch_size) // ranks)
        for loader in objects
        if isinstance(loader, DataLoader)
        and loader.batch_size
        and (isinstance(loader.sampler, RandomSampler) or not shuffled)
    ]


def _num_readers(accelerator: Any, settings: AppliedSettings) -> int:
    """Return the number of ranks, or groups of ranks, with different samples."""
    return int(accelerator.num_processes) // settings.sample_group_size


def install_required_accumulate(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> None:
    """Refuse a script that never accumulates, since its global batch size would be smaller than requested."""
    steps = settings.forced_accumulation

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

    if (steps or 1) > 1:
        wrap(accelerator_class, "accumulate", accumulate)
        wrap(accelerator_class, "backward", backward)


def install_window_weights(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> None:
    """Complete the weighting of a window before a script clips gradients or steps."""

    def clip(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if has_weights(self):
            self._zerofit_weights.before_step()
        return original(self, *args, **kwargs)

    def step(self: Any, _: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._zerofit_weights.before_step()
        return original(*args, **kwargs)

    def has_weights(accelerator: Any, _: Any = None) -> bool:
        return hasattr(accelerator, "_zerofit_weights")

    if (settings.forced_accumulation or 1) > 1:
        wrap(accelerator_class, "clip_grad_norm_", clip)
        wrap(accelerator_class, "clip_grad_value_", clip)
        wrap_steps(accelerator_class, "_zerofit_weighs", step, only=has_weights)


def install_kept_accumulation(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> None:
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


def install_batch_search(module: ModuleType, settings: AppliedSettings, changes: Changes) -> None:
    """Handle out-of-memory errors by recovery instead of find_executable_batch_size.

    The latter would reduce the global batch size at the same learning rate.

    Args:
        module: accelerate.utils.memory.
    """

    def should_reduce(original: Any, exception: Exception) -> bool:
        if not original(exception):
            return False
        if settings.plan.recovers:
            changes.add(
                "find_executable_batch_size does not reduce the batch size, which would change the global "
                "batch size: the run is restarted with another plan"
            )
            return False
        changes.add(
            "find_executable_batch_size reduces the batch size: the global batch size is not the plan's"
        )
        return True

    wrap(module, "should_reduce_batch_size", should_reduce)
