"""All hooks of the training process, in order: they make an unmodified script train as planned."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerofit.core.upstream.deepspeed import wait_for_every_gather
from zerofit.generation.ranks.meeting import watch
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
    sample_groups,
    sample_order,
    told_to_stop,
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
    from pathlib import Path

    from zerofit.core.plan import Plan
    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings


@dataclass(frozen=True, slots=True)
class Hook:
    """One change to a class or module of another library."""

    name: str
    install: Callable[[Any, AppliedSettings, Changes], None]
    """Its arguments are the class or module, the settings, and the list of changes; does nothing if the plan
    does not need it."""
    why_here: str
    """The reason for its position in the list."""


ACCELERATOR_HOOKS = (
    Hook("observation", observe.install_in_accelerate, "first: all that prepare() and saving do is a part"),
    Hook("changed model", changed_model.install, "before all others: they see the model that trains"),
    Hook("step before saving", deepspeed_window.install, "on other methods than prepare()"),
    Hook("checkpoints", checkpoints.install, "after the step that saving takes"),
    Hook("order of samples", sample_order.install, "on the constructor: a part of each checkpoint"),
    Hook("stop on a signal", told_to_stop.install, "on prepare(), which it only sees"),
    Hook("memory in trackers", tracked_memory.install, "on log() alone"),
    Hook("clipping", clipping.install, "around the step that may be skipped: only a step is clipped for"),
    Hook("skipped steps", skipped_steps.install, "around the scaler's own step, which says if it skipped"),
    Hook("clipping by torch", clipping.install_watch, "on the constructor alone"),
    Hook("grouped batches", grouped_batches.install, "before accelerate shards the batches over the ranks"),
    Hook(
        "backward", backward.install, "around accelerate's; grouped batches around it only say what they did"
    ),
    Hook("joined prepare", join_prepare.install, "model and optimizer are together for all that follow"),
    Hook("optimizer", optimizer_swap.install, "the plan's stands in the script's place before it is checked"),
    Hook("optimizer check", optimizer_swap.install_check, "looks at the optimizer that really trains"),
    Hook("micro-batches", micro_batches.install, "around what accelerate wraps the model in"),
    Hook("compiled model", compiled_model.install, "right around accelerate, which compiles"),
    Hook("kept accumulation", accelerate_hooks.install_kept_accumulation, "on a property alone"),
    Hook("window weights", accelerate_hooks.install_window_weights, "closest to the step and the clipping"),
    Hook("required accumulate", accelerate_hooks.install_required_accumulate, "right around accelerate"),
    Hook("DeepSpeed's set-up", accelerate_hooks.install_prepare, "right around accelerate's prepare()"),
    Hook("sample groups", sample_groups.install, "right around accelerate, behind the micro-batches"),
    Hook("tensor groups", tensor_groups.install, "right around accelerate's prepare()"),
    Hook("sequence shards", sequence_shards.install, "on the constructor alone"),
    Hook("pipeline stages", pipeline.install, "right around accelerate, which must not wrap a stage"),
    Hook("arguments", accelerate_hooks.install_arguments, "right around accelerate's constructor"),
)
"""Hooks on Accelerator. If several wrap the same method, the first in the list is the outermost: it is called
first, with the script's arguments."""

TRAINER_HOOKS = (
    Hook("observation", observe.install_in_trainer, "first: all that evaluating and saving do is a part"),
    Hook("optimizer", trainer_optimizer.install, "remembers the script's before train() sets DeepSpeed up"),
    Hook("loss", trainer_loss.install, "on compute_loss() alone"),
    Hook("arguments", trainer_arguments.install, "right around train(), which reads the arguments again"),
    Hook("checkpoints", trainer_checkpoints.install, "right around train(), which reads the checkpoint"),
    Hook("memory in trackers", tracked_memory.install_in_trainer, "before train() logs anything"),
    Hook("changed model", changed_model.install_in_trainer, "on the constructor alone"),
    Hook("sample groups", sample_groups.install_in_trainer, "on get_tp_size() alone"),
    Hook("pipeline stages", pipeline.install_in_trainer, "before Trainer puts the model on its device"),
)
"""Hooks on transformers' Trainer, outermost first."""


def _install_waiting_gathers(module: Any, settings: AppliedSettings, changes: Changes) -> None:
    if settings.uses_deepspeed and settings.on_cpu:
        wait_for_every_gather(module)


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
    Hook("torch.serialization", observe.install_saving, "before torch takes save() from it"),
    Hook("torch.optim.optimizer", observe.install_steps, "before an optimizer is made"),
    Hook("torch.utils.data.dataloader", observe.install_data, "before a DataLoader is made"),
    Hook("deepspeed.runtime.engine", observe.install_in_engine, "before an engine is made"),
    Hook("transformers.trainer_callback", observe.install_in_callbacks, "before a Trainer is made"),
    Hook("transformers.trainer_callback", told_to_stop.install_in_callbacks, "before a Trainer is made"),
    Hook("transformers.trainer_callback", trial.install_in_callbacks, "around what asks it to save"),
    Hook("torch.utils.data.sampler", sample_order.install_in_samplers, "before an order is drawn"),
    Hook("torch.utils.data.dataloader", sample_order.install_in_torch_loaders, "before one is made"),
    Hook("accelerate.data_loader", sample_order.install_in_loaders, "before the script imports from it"),
    Hook("accelerate.data_loader", told_to_stop.install_in_loaders, "before a DataLoader is prepared"),
    Hook("accelerate.state", accelerate_hooks.install_gloo, "before an Accelerator asks for its ranks"),
    Hook("deepspeed.runtime.zero.partition_parameters", _install_waiting_gathers, "before a model is made"),
    Hook(
        "deepspeed.runtime.zero.partition_parameters",
        scalars.install_in_partitioning,
        "before a model is made",
    ),
    Hook("deepspeed.runtime.engine", scalars.install, "before an engine is made"),
    Hook("deepspeed.runtime.engine", elastic_resume.install, "before an engine loads a checkpoint"),
    Hook("deepspeed.runtime.engine", partitioned_models.install_in_engine, "before an engine is made"),
    Hook("deepspeed.runtime.engine", expert_modules.install, "before an engine partitions a model"),
    Hook("deepspeed", sequence_shards.install_in_deepspeed, "before an engine is made"),
    Hook("deepspeed.runtime.engine", sequence_shards.install_in_engine, "around the engine's forward pass"),
    Hook("torch.nn.utils", pipeline.install_in_clipping, "behind the clipping that the plan says"),
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


def install(plan: Plan, changes: Changes, *, run_folder: Path | None = None) -> None:
    """Install the hooks that make the script train as planned."""
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
