"""The Accelerator's arguments as planned: process group on the CPU, precision, accumulation, engine."""

from __future__ import annotations

import inspect
import os
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

from zerofit.configs.write.accelerate import RANKS_LOAD_WHOLE
from zerofit.configs.write.command import MIXED_PRECISION
from zerofit.core.errors import UserError
from zerofit.core.upstream.accelerate import shard_on_cpu_ranks
from zerofit.models.changes.kernels import set_tf32
from zerofit.training.setup.deepspeed.config import fill_early
from zerofit.training.step.window_weights import WindowWeights
from zerofit.training.wrapping import wrap

if TYPE_CHECKING:
    from types import ModuleType

    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper


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


def install_sharding(module: ModuleType, settings: AppliedSettings, changes: Changes) -> None:
    """Let accelerate use FSDP2 on CPU ranks, which rehearse it; on GPUs it does by itself."""
    if settings.uses_fsdp2 and settings.on_cpu:
        shard_on_cpu_ranks(module)


def wrappers(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Make an Accelerator with the precision, accumulation, DeepSpeed plugin and tf32 of the plan."""

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
        if settings.uses_fsdp2:
            _drop_fsdp(arguments, changes)
        if not settings.uses_deepspeed and (plugins := _drop_plugin(arguments)):
            os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)  # the plugin's constructor sets it
            instead = "FSDP2 shards" if settings.uses_fsdp2 else "PyTorch trains without DeepSpeed"
            changes.add(f"{instead} as the plan says; the script brings a DeepSpeedPlugin")
            clipping = next(filter(None, map(_clipping_of, plugins)), None)
            if clipping and settings.strategy.gradient_clipping is None:
                changes.add(
                    f"gradients are not clipped at {clipping:g}, as the DeepSpeedPlugin would: "
                    f"--gradient-clipping {clipping:g} does"
                )
        original(**arguments)
        _check_engine(self, settings)
        if self._zerofit_by_script and settings.uses_deepspeed:
            fill_early(self, settings)
        set_number_formats(settings, changes)

    return {"__init__": init}


def _drop_plugin(arguments: dict[str, Any]) -> list[Any]:
    """Drop the script's DeepSpeedPlugins from an Accelerator's arguments, and return them."""
    given = [arguments.pop(name, None) for name in ("deepspeed_plugin", "deepspeed_plugins")]
    many = (plugin.values() if isinstance(plugin, dict) else [plugin] for plugin in given)
    return [plugin for plugins in many for plugin in plugins if plugin is not None]


def _clipping_of(plugin: Any) -> float | None:
    """Return the norm at which a DeepSpeedPlugin lets the engine clip gradients; None if it names none."""
    clipping = (getattr(plugin, "deepspeed_config", None) or {}).get("gradient_clipping")
    return float(clipping) if isinstance(clipping, int | float) else None


def _drop_fsdp(arguments: dict[str, Any], changes: Changes) -> None:
    """Drop the script's FSDP plugin from an Accelerator's arguments: accelerate makes the plan's.

    Its constructor has set a variable for transformers, which is the plan's again.
    """
    brought = [
        name for name in ("fsdp_plugin", "parallelism_config") if arguments.pop(name, None) is not None
    ]
    os.environ.update(RANKS_LOAD_WHOLE)
    if brought:
        changes.add(f"FSDP2 is configured as the plan says; the script brings {' and '.join(brought)}")


def _check_engine(accelerator: Any, settings: AppliedSettings) -> None:
    """Check that the Accelerator trains on the engine that the plan and its printed line say.

    Raises:
        UserError: it does not.
    """
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    kind = "FSDP2" if kind == "FSDP" and accelerator.is_fsdp2 else kind
    sharding = {"DEEPSPEED": settings.uses_deepspeed, "FSDP2": settings.uses_fsdp2}
    is_as_planned = all((kind == name) == is_planned for name, is_planned in sharding.items())
    if is_as_planned and kind not in ("FSDP", "MEGATRON_LM"):
        return
    raise UserError(
        "engine-not-as-planned",
        "the script trains on another engine than the plan says",
        found=f"accelerator.distributed_type is {kind}, and the plan says {settings.strategy.engine.value}",
        why="memory, time and checkpoints of the plan are those of its engine",
        fix="remove what chooses an engine in the script (DeepSpeedPlugin, fsdp_plugin, TrainingArguments' "
        "deepspeed and fsdp), or choose the same for zerofit: --zero-stage N, --engine fsdp2 or native",
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
