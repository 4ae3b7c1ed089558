"""All hooks of the training process, by module; the order of the steps of a method is in methods.py."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.upstream.accelerate import load_states_under_fsdp2
from zerofit.core.upstream.deepspeed import wait_for_every_gather
from zerofit.machine.extensions import sign_lock
from zerofit.ranks.meeting import watch
from zerofit.scripts.on_import import when_imported
from zerofit.training import generate_hooks, methods
from zerofit.training.batch import sample_groups, sample_order
from zerofit.training.pipeline import hooks as pipeline
from zerofit.training.reporting import observe
from zerofit.training.saving import checkpoints, stop_signal, whole_saving
from zerofit.training.settings import settings_of
from zerofit.training.setup import accelerator_arguments, batch_size, quantized_loading, trainer_arguments
from zerofit.training.setup.deepspeed import partitioned_models, scalars, sequence_shards, tensor_groups
from zerofit.training.step import accumulation, backward, clipping, schedulers, sharded_tensors
from zerofit.training.step.deepspeed.optimizer_step import hide_renamed_collectives
from zerofit.training.wrapping import install_steps, wrap

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerofit.core.plan import Plan
    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings


@dataclass(frozen=True, slots=True)
class Hook:
    """One change to a module of another library."""

    module: str
    install: Callable[[Any, AppliedSettings, Changes], None]
    """Called with the module, the settings, and the list of changes; does nothing if the plan does not need
    it."""
    why_here: str
    """What it must come before."""


def _install_waiting_gathers(module: Any, settings: AppliedSettings, changes: Changes) -> None:
    if settings.uses_deepspeed and settings.on_cpu:
        wait_for_every_gather(module)


def _install_build_locks(module: Any, settings: AppliedSettings, changes: Changes) -> None:
    """Sign the lock of each build, so that the launcher can tell the lock of a killed rank from others."""

    def try_acquire(original: Any, self: Any) -> Any:
        has_lock = original(self)
        if has_lock:
            sign_lock(Path(self.lock_file_path))
        return has_lock

    wrap(module.FileBaton, "try_acquire", try_acquire)


def _install_generate(module: Any, settings: AppliedSettings, changes: Changes) -> None:
    if settings.plan.topology.world_size > 1:
        generate_hooks.install(module, changes, limit_s=settings.plan.generate_limit_s)


def install_accelerator(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> None:
    """Make the methods and properties of an Accelerator class work as planned."""
    install_steps(methods.ACCELERATOR, accelerator_class, settings, changes)
    backward.install_trigger(accelerator_class, settings, changes)
    accumulation.install_kept(accelerator_class, settings, changes)
    sample_groups.install_num_processes(accelerator_class, settings, changes)
    if settings.uses_deepspeed:
        hide_renamed_collectives()


def install_trainer(trainer_class: Any, settings: AppliedSettings, changes: Changes) -> None:
    """Make the methods of a Trainer class work as planned."""
    install_steps(methods.TRAINER, trainer_class, settings, changes)


def _install_accelerator(module: Any, settings: AppliedSettings, changes: Changes) -> None:
    install_accelerator(module.Accelerator, settings, changes)


def _install_callbacks(module: Any, settings: AppliedSettings, changes: Changes) -> None:
    install_steps(methods.CALLBACKS, module.CallbackHandler, settings, changes)


def _install_data_loader(module: Any, settings: AppliedSettings, changes: Changes) -> None:
    install_steps(methods.DATA_LOADER, module.DataLoader, settings, changes)


def _install_engine(module: Any, settings: AppliedSettings, changes: Changes) -> None:
    install_steps(methods.ENGINE, module.DeepSpeedEngine, settings, changes)


def _install_resumed_states(module: Any, settings: AppliedSettings, changes: Changes) -> None:
    if settings.uses_fsdp2:
        load_states_under_fsdp2(module)


def _install_clipping(module: Any, settings: AppliedSettings, changes: Changes) -> None:
    install_steps(methods.TORCH_CLIPPING, module, settings, changes)
    clipping.install_in_clip_grad(module, settings, changes)


def _install_training_arguments(module: Any, settings: AppliedSettings, changes: Changes) -> None:
    if settings.on_cpu:
        # `use_cpu`, which the GPU check requires with bf16, would disable DeepSpeed.
        module.is_torch_bf16_gpu_available = lambda: True
    trainer_arguments.install_arguments(module.TrainingArguments, settings, changes)

    @functools.cache
    def hook_trainer() -> None:
        when_imported("transformers.trainer", lambda found: install_trainer(found.Trainer, settings, changes))

    def post_init(original: Any, self: Any) -> None:
        # Not before: while transformers.trainer imports transformers.training_args it has no Trainer yet.
        hook_trainer()
        original(self)

    wrap(module.TrainingArguments, "__post_init__", post_init)


MODULE_HOOKS = (
    Hook("torch.autograd", observe.install_backward, "before anything is trained"),
    Hook("torch.serialization", observe.install_saving, "before torch imports save() from it"),
    Hook("torch.serialization", whole_saving.install_in_torch, "before torch imports save() from it"),
    Hook("torch.optim.optimizer", observe.install_steps, "before an optimizer is made"),
    Hook("torch.utils.data.dataloader", _install_data_loader, "before a DataLoader is made"),
    Hook("torch.utils.data.sampler", sample_order.install_in_samplers, "before an order is drawn"),
    Hook("torch.utils.file_baton", _install_build_locks, "before an op is built"),
    Hook("torch.nn.utils", _install_clipping, "before the script imports clip_grad_norm_ from it"),
    Hook("torch.distributed.tensor", sharded_tensors.install, "before a weight is sharded"),
    Hook("deepspeed.runtime.zero.partition_parameters", _install_waiting_gathers, "before a model is made"),
    Hook(
        "deepspeed.runtime.zero.partition_parameters",
        scalars.install_in_partitioning,
        "before a model is made",
    ),
    Hook("deepspeed.runtime.base_optimizer", schedulers.install, "before an optimizer is wrapped"),
    Hook("deepspeed.runtime.engine", _install_engine, "before an engine is made"),
    Hook("deepspeed", sequence_shards.install_in_deepspeed, "before an engine is made"),
    Hook("transformers.trainer_callback", _install_callbacks, "before a Trainer is made"),
    Hook("transformers.modeling_utils", partitioned_models.install, "before a model is loaded"),
    Hook("transformers.modeling_utils", whole_saving.install, "before a model is saved"),
    Hook("peft.peft_model", whole_saving.install_in_peft, "before a model is saved"),
    Hook("transformers.integrations.deepspeed", tensor_groups.install_in_loading, "before a model is loaded"),
    Hook("transformers.modeling_utils", quantized_loading.install, "before a model is loaded"),
    Hook("transformers.generation.utils", _install_generate, "before a model is made"),
    Hook("accelerate.state", accelerator_arguments.install_gloo, "before an Accelerator is created"),
    Hook("accelerate.state", accelerator_arguments.install_sharding, "before an Accelerator is created"),
    Hook(
        "accelerate.utils.fsdp_utils", _install_resumed_states, "before accelerate and Trainer import from it"
    ),
    Hook("accelerate.data_loader", sample_order.install_in_loaders, "before the script imports from it"),
    Hook("accelerate.data_loader", stop_signal.install_in_loaders, "before a DataLoader is prepared"),
    Hook("accelerate.accelerator", _install_accelerator, "before an Accelerator is made"),
    Hook("accelerate.accelerator", sample_groups.install_in_accelerate, "before an Accelerator gathers"),
    Hook("accelerate.accelerator", pipeline.install_in_accelerate, "before a DataLoader is prepared"),
    Hook("accelerate.scheduler", sample_groups.install_in_scheduler, "before a scheduler is prepared"),
    Hook("accelerate.utils.memory", batch_size.install_batch_search, "before a batch size is searched"),
    Hook(
        "transformers.trainer_utils",
        checkpoints.install_last_checkpoint,
        "before Trainer and the script import get_last_checkpoint from it",
    ),
    Hook("transformers.training_args", _install_training_arguments, "before TrainingArguments are made"),
)
"""Hooks that run as soon as the script imports a module, by its name."""


_installed: tuple[Plan, Changes] | None = None


def hooked_plan() -> tuple[Plan, Changes] | None:
    """Return the plan whose hooks this process has, and its list of changes; None without hooks."""
    return _installed


def install(plan: Plan, changes: Changes, *, run_folder: Path | None = None) -> None:
    """Install the hooks that make the script train as planned."""
    global _installed
    _installed = plan, changes
    settings = settings_of(plan, run_folder=run_folder)
    if plan.topology.world_size > 1 and plan.generate_limit_s:
        watch()
    for hook in MODULE_HOOKS:

        def act(module: Any, hook: Hook = hook) -> None:
            hook.install(module, settings, changes)

        when_imported(hook.module, act)
