"""DeepSpeed's configuration: what the script reads of it early, and what prepare() fills in for "auto"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.core.upstream.accelerate import prepared_optimizers
from zerofit.training.setup.batch_size import batch_sizes, captured_batch_size
from zerofit.training.setup.deepspeed import partitioned_models, state_overrides
from zerofit.training.setup.optimizer_swap import is_plain_optimizer
from zerofit.training.step import schedulers
from zerofit.training.step.deepspeed import optimizer_step

if TYPE_CHECKING:
    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper


def wrappers(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Complete DeepSpeed's configuration before prepare() makes the engine, and watch the engine's steps."""

    def prepare(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
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
        with_groups = [
            (optimizer, [list(group["params"]) for group in optimizer.param_groups]) for optimizer in own
        ]
        prepared = original(self, *args, **kwargs)
        schedulers.lead_to_live_optimizers(prepared_optimizers(self))
        optimizer_step.watch(self, with_groups, changes)
        window = optimizer_step.window_of(self)
        if window is not None:
            for optimizer in own:
                optimizer_step.refuse_step_of(optimizer, window)
        return prepared

    return {"prepare": prepare}


def fill_early(accelerator: Any, settings: AppliedSettings) -> None:
    """Replace "auto" values that are known when the Accelerator is made, for scripts that read them then.

    prepare() decides anew: until then the script may set its accumulation, or one of these values.
    """
    plugin = accelerator.state.deepspeed_plugin
    known = {
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
        "gradient_clipping": settings.strategy.gradient_clipping or 0.0,
        "train_micro_batch_size_per_gpu": captured_batch_size(settings),
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
        sizes = [batch_sizes(accelerator, objects, settings, shuffled=only) for only in (True, False)]
        fallback = captured_batch_size(settings) or 1
        config["train_micro_batch_size_per_gpu"] = next((found[0] for found in sizes if found), fallback)
