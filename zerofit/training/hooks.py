"""All hooks of the training process, in order, which make an unmodified script train as planned."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.upstream.deepspeed import wait_for_every_gather
from zerofit.generation.ranks.meeting import watch
from zerofit.machine.extensions import sign_lock
from zerofit.scripts.on_import import when_imported
from zerofit.training import (
    accelerate_hooks,
    backward,
    changed_model,
    checkpoints,
    clipping,
    compiled_model,
    generate_hooks,
    grouped_batches,
    observe,
    optimizer_swap,
    quantized_loading,
    replicas,
    sample_groups,
    sample_order,
    schedulers,
    stop_signal,
    tracked_memory,
    trial,
)
from zerofit.training.deepspeed import (
    deepspeed_window,
    elastic_resume,
    expert_modules,
    join_prepare,
    partitioned_models,
    scalars,
    sequence_shards,
    skipped_steps,
    tensor_groups,
    whole_saving,
)
from zerofit.training.micro_batches import hooks as micro_batches
from zerofit.training.pipeline import hooks as pipeline
from zerofit.training.settings import settings_of
from zerofit.training.trainer import trainer_arguments, trainer_checkpoints, trainer_loss, trainer_optimizer
from zerofit.training.wrapping import wrap

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zerofit.core.plan import Plan
    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings


@dataclass(frozen=True, slots=True)
class Hook:
    """One change to a class or module of another library."""

    name: str
    install: Callable[[Any, AppliedSettings, Changes], None]
    """Called with the class or module, the settings, and the list of changes; does nothing if the plan does
    not need it."""
    why_here: str
    """The reason for its position in the list."""


ACCELERATOR_HOOKS = (
    Hook("observation", observe.install_in_accelerate, "first: covers everything in prepare() and saving"),
    Hook("changed model", changed_model.install, "before all others, which need the trained model"),
    Hook("step before saving", deepspeed_window.install, "on other methods than prepare()"),
    Hook("checkpoints", checkpoints.install, "after the step that saving triggers"),
    Hook("order of samples", sample_order.install, "on the constructor: saved in each checkpoint"),
    Hook("late parameters", replicas.install, "only observes prepare()"),
    Hook("stop on a signal", stop_signal.install, "only observes prepare()"),
    Hook("memory in trackers", tracked_memory.install, "only on log()"),
    Hook("clipping", clipping.install, "around steps that may be skipped, which need no clipping"),
    Hook("skipped steps", skipped_steps.install, "around the scaler's own step, which says if it skipped"),
    Hook("clipping by torch", clipping.install_watch, "only on the constructor"),
    Hook("grouped batches", grouped_batches.install, "before accelerate shards the batches over the ranks"),
    Hook("backward", backward.install, "around accelerate's; grouped batches only report"),
    Hook("joined prepare", join_prepare.install, "later hooks get model and optimizer together"),
    Hook("optimizer", optimizer_swap.install, "replaces the script's before the check"),
    Hook("optimizer check", optimizer_swap.install_check, "checks the optimizer that trains"),
    Hook("micro-batches", micro_batches.install, "outside accelerate's wrappers of the model"),
    Hook("compiled model", compiled_model.install, "directly around accelerate, which compiles"),
    Hook("kept accumulation", accelerate_hooks.install_kept_accumulation, "only on a property"),
    Hook("window weights", accelerate_hooks.install_window_weights, "closest to the step and the clipping"),
    Hook("required accumulate", accelerate_hooks.install_required_accumulate, "directly around accelerate"),
    Hook("DeepSpeed's set-up", accelerate_hooks.install_prepare, "directly around prepare()"),
    Hook("sample groups", sample_groups.install, "directly around accelerate, inside the micro-batches"),
    Hook("tensor groups", tensor_groups.install, "directly around prepare()"),
    Hook("sequence shards", sequence_shards.install, "only on the constructor"),
    Hook("pipeline stages", pipeline.install, "directly around accelerate, which must not wrap a stage"),
    Hook("arguments", accelerate_hooks.install_arguments, "directly around the constructor"),
)
"""Hooks on Accelerator. If several wrap the same method, the first in the list is the outermost: it is called
first, with the script's arguments."""

TRAINER_HOOKS = (
    Hook("observation", observe.install_in_trainer, "first: covers everything in evaluating and saving"),
    Hook("optimizer", trainer_optimizer.install, "records the script's before train() sets up DeepSpeed"),
    Hook("loss", trainer_loss.install, "only on compute_loss()"),
    Hook("arguments", trainer_arguments.install, "directly around train(), which reads the arguments again"),
    Hook("checkpoints", trainer_checkpoints.install, "directly around train(), which loads the checkpoint"),
    Hook("memory in trackers", tracked_memory.install_in_trainer, "before train() logs anything"),
    Hook("changed model", changed_model.install_in_trainer, "only on the constructor"),
    Hook("sample groups", sample_groups.install_in_trainer, "only on get_tp_size()"),
    Hook("pipeline stages", pipeline.install_in_trainer, "before Trainer moves the model to its device"),
)
"""Hooks on transformers' Trainer, outermost first."""


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


def _install_accelerator(module: Any, settings: AppliedSettings, changes: Changes) -> None:
    install_all(ACCELERATOR_HOOKS, module.Accelerator, settings, changes)


def _install_trainer(module: Any, settings: AppliedSettings, changes: Changes) -> None:
    if settings.on_cpu:
        # `use_cpu`, which the GPU check requires with bf16, would disable DeepSpeed.
        module.is_torch_bf16_gpu_available = lambda: True
    trainer_arguments.install_arguments(module.TrainingArguments, settings, changes)

    @functools.cache
    def hook_trainer() -> None:
        when_imported(
            "transformers.trainer", lambda found: install_all(TRAINER_HOOKS, found.Trainer, settings, changes)
        )

    def post_init(original: Any, self: Any) -> None:
        # Not before: while transformers.trainer imports transformers.training_args it has no Trainer yet.
        hook_trainer()
        original(self)

    wrap(module.TrainingArguments, "__post_init__", post_init)


MODULE_HOOKS = (
    Hook("torch.autograd", observe.install_backward, "before anything is trained"),
    Hook("torch.serialization", observe.install_saving, "before torch imports save() from it"),
    Hook("torch.optim.optimizer", observe.install_steps, "before an optimizer is made"),
    Hook("torch.utils.data.dataloader", observe.install_data, "before a DataLoader is made"),
    Hook("deepspeed.runtime.engine", observe.install_in_engine, "before an engine is made"),
    Hook("transformers.trainer_callback", observe.install_in_callbacks, "before a Trainer is made"),
    Hook("transformers.trainer_callback", stop_signal.install_in_callbacks, "before a Trainer is made"),
    Hook("transformers.trainer_callback", trial.install_in_callbacks, "around callbacks that request saving"),
    Hook("torch.utils.data.sampler", sample_order.install_in_samplers, "before an order is drawn"),
    Hook("torch.utils.data.dataloader", sample_order.install_in_torch_loaders, "before one is made"),
    Hook("accelerate.data_loader", sample_order.install_in_loaders, "before the script imports from it"),
    Hook("accelerate.data_loader", stop_signal.install_in_loaders, "before a DataLoader is prepared"),
    Hook("accelerate.state", accelerate_hooks.install_gloo, "before an Accelerator is created"),
    Hook("torch.utils.file_baton", _install_build_locks, "before an op is built"),
    Hook("deepspeed.runtime.zero.partition_parameters", _install_waiting_gathers, "before a model is made"),
    Hook(
        "deepspeed.runtime.zero.partition_parameters",
        scalars.install_in_partitioning,
        "before a model is made",
    ),
    Hook("deepspeed.runtime.base_optimizer", schedulers.install, "before an optimizer is wrapped"),
    Hook("deepspeed.runtime.engine", scalars.install, "before an engine is made"),
    Hook("deepspeed.runtime.engine", elastic_resume.install, "before an engine loads a checkpoint"),
    Hook("deepspeed.runtime.engine", partitioned_models.install_in_engine, "before an engine is made"),
    Hook("deepspeed.runtime.engine", expert_modules.install, "before an engine partitions a model"),
    Hook("deepspeed", sequence_shards.install_in_deepspeed, "before an engine is made"),
    Hook("deepspeed.runtime.engine", sequence_shards.install_in_engine, "around the engine's forward pass"),
    Hook("torch.nn.utils", pipeline.install_in_clipping, "inside the plan's clipping"),
    Hook("torch.nn.utils", clipping.install_in_torch, "before the script imports clip_grad_norm_ from it"),
    Hook("transformers.modeling_utils", partitioned_models.install, "before a model is loaded"),
    Hook("transformers.modeling_utils", whole_saving.install, "before a model is saved"),
    Hook("peft.peft_model", whole_saving.install_in_peft, "before a model is saved"),
    Hook("transformers.integrations.deepspeed", tensor_groups.install_in_loading, "before a model is loaded"),
    Hook("transformers.modeling_utils", quantized_loading.install, "before a model is loaded"),
    Hook("transformers.generation.utils", _install_generate, "before a model is made"),
    Hook("accelerate.accelerator", _install_accelerator, "before an Accelerator is made"),
    Hook("accelerate.accelerator", sample_groups.install_in_accelerate, "before an Accelerator gathers"),
    Hook("accelerate.accelerator", pipeline.install_in_accelerate, "before a DataLoader is prepared"),
    Hook("accelerate.scheduler", sample_groups.install_in_scheduler, "before a scheduler is prepared"),
    Hook("accelerate.utils.memory", accelerate_hooks.install_batch_search, "before a batch size is searched"),
    Hook(
        "transformers.trainer_utils",
        checkpoints.install_last_checkpoint,
        "before Trainer and the script import get_last_checkpoint from it",
    ),
    Hook("transformers.training_args", _install_trainer, "before TrainingArguments are made"),
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

        when_imported(hook.name, act)


def install_all(hooks: Sequence[Hook], target: Any, settings: AppliedSettings, changes: Changes) -> None:
    """Install hooks so that the first of them becomes the outermost."""
    for hook in reversed(hooks):
        hook.install(target, settings, changes)
