"""What happens in the methods of accelerate, Trainer, torch and DeepSpeed under a plan, step by step.

Each method has one list. The first step is called first, with the script's arguments; it may change them,
calls the next step, and may change what that returns. What follows the last step is the library's own method.
Steps that the plan does not need are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.core.upstream.deepspeed import BROADCAST_MODEL
from zerofit.core.upstream.transformers import LOAD_MODEL, LOAD_OPTIMIZER, RUN_EPOCH, SAVE_CHECKPOINT
from zerofit.training import trial
from zerofit.training.batch import grouped_batches, sample_groups, sample_order
from zerofit.training.batch.micro_batches import hooks as micro_batches
from zerofit.training.pipeline import hooks as pipeline
from zerofit.training.reporting import observe, tracked_memory
from zerofit.training.saving import (
    checkpoints,
    data_only,
    elastic_resume,
    stop_signal,
    trainer_checkpoints,
    whole_saving,
)
from zerofit.training.setup import (
    accelerator_arguments,
    batch_size,
    changed_model,
    compiled_model,
    optimizer_swap,
    replicas,
    sharded_model,
    sharded_prepare,
    trainer_arguments,
    trainer_optimizer,
)
from zerofit.training.setup.deepspeed import (
    config,
    expert_modules,
    joined_prepare,
    partitioned_models,
    scalars,
    sequence_shards,
    tensor_groups,
)
from zerofit.training.step import (
    accumulation,
    backward,
    clipping,
    sharded_gradients,
    sharded_writes,
    skipped_steps,
    trainer_loss,
)
from zerofit.training.step.deepspeed import optimizer_step
from zerofit.training.wrapping import Step

if TYPE_CHECKING:
    from zerofit.training.wrapping import Steps

_SETUP: Steps = {
    "__init__": (
        Step("order of samples", sample_order.wrappers, "after the rest: registers what is saved"),
        Step("clipping by torch", clipping.watch_wrappers, "after the rest: records the Accelerator"),
        Step("sequence shards", sequence_shards.wrappers, "after accelerate's own: adds the groups"),
        Step("pipeline stages", pipeline.wrappers, "after accelerate's own: refuses its precision"),
        Step("arguments", accelerator_arguments.wrappers, "directly around accelerate's: its arguments"),
    ),
    "prepare": (
        Step("observation", observe.wrappers, "around all: the phase is preparing"),
        Step("changed model", changed_model.wrappers, "before all others, which need the trained model"),
        Step("stop on a signal", stop_signal.wrappers, "only records the Accelerator"),
        Step(
            "joined prepare",
            joined_prepare.wrappers,
            "once per engine: what follows gets its optimizer, too",
        ),
        Step("sharded prepare", sharded_prepare.wrappers, "once per model: what follows gets its optimizer"),
        Step("sharded gradients", sharded_gradients.wrappers, "after what follows: watches what is sharded"),
        Step("sharded writes", sharded_writes.wrappers, "after what follows: watches what is sharded"),
        Step("optimizer", optimizer_swap.wrappers, "replaces the script's before the check"),
        Step("optimizer check", optimizer_swap.check_wrappers, "checks the optimizer that trains"),
        Step("micro-batches", micro_batches.wrappers, "after what follows: outside accelerate's wrappers"),
        Step("batch size", batch_size.wrappers, "before the engine is made"),
        Step("DeepSpeed's configuration", config.wrappers, "before the engine is made, and watches it"),
        Step("sample groups", sample_groups.wrappers, "only checks DataLoaders"),
        Step("tensor groups", tensor_groups.wrappers, "before the engine shards the model"),
        Step("pipeline stages", pipeline.wrappers, "directly around accelerate's: cuts model and optimizer"),
        Step("FSDP2's units", sharded_model.wrappers, "directly around accelerate's, which shards"),
    ),
    "prepare_model": (
        Step("changed model", changed_model.wrappers, "before all others, which need the trained model"),
        Step("late parameters", replicas.wrappers, "after what follows: watches DistributedDataParallel"),
        Step("joined prepare", joined_prepare.wrappers, "calls prepare() under DeepSpeed"),
        Step("sharded prepare", sharded_prepare.wrappers, "calls prepare() under FSDP2"),
        Step("micro-batches", micro_batches.wrappers, "after what follows: outside accelerate's wrappers"),
        Step("compiled model", compiled_model.wrappers, "after accelerate, which compiles"),
        Step("pipeline stages", pipeline.wrappers, "directly around accelerate's: DDP wraps no stage"),
    ),
    "prepare_optimizer": (
        Step("changed model", changed_model.wrappers, "groups match the changed model before all others"),
        Step("clipping", clipping.wrappers, "first in the optimizer's step(): skipped steps need none"),
        Step("skipped steps", skipped_steps.wrappers, "around the scaler's step(), which says if it skipped"),
        Step("joined prepare", joined_prepare.wrappers, "calls prepare() under DeepSpeed"),
        Step("sharded prepare", sharded_prepare.wrappers, "returns those that prepare() made with a model"),
        Step("optimizer", optimizer_swap.wrappers, "replaces the script's before it is prepared"),
        Step("micro-batches", micro_batches.wrappers, "undoes skipped losses' passes before it"),
        Step("sharded gradients", sharded_gradients.wrappers, "after those: what is left is not reduced"),
        Step("window weights", accumulation.weight_wrappers, "last before the optimizer's own step()"),
    ),
    "free_memory": (
        Step("joined prepare", joined_prepare.wrappers, "forgets models and optimizers"),
        Step("sharded prepare", sharded_prepare.wrappers, "forgets models and optimizers"),
        Step("micro-batches", micro_batches.wrappers, "forgets pending passes"),
    ),
}
_BATCH: Steps = {
    "prepare_data_loader": (
        Step("grouped batches", grouped_batches.wrappers, "before accelerate shards them over the ranks"),
    ),
    "gather": (Step("sample groups", sample_groups.wrappers, "each group's samples once"),),
    "reduce": (Step("sample groups", sample_groups.wrappers, "each group's values once"),),
}
_STEP: Steps = {
    "accumulate": (Step("required accumulate", accumulation.required_wrappers, "the script accumulates"),),
    "backward": (
        Step("grouped batches", grouped_batches.wrappers, "only reports, at the first step"),
        Step("backward", backward.wrappers, "the loss's weight; in micro-batches, or the engine"),
        Step("required accumulate", accumulation.required_wrappers, "refuses a pass of accelerate's own"),
    ),
    "unscale_gradients": (Step("micro-batches", micro_batches.wrappers, "undoes skipped losses' passes"),),
    "clip_grad_norm_": (
        Step("clipping", clipping.wrappers, "the plan's norm; DeepSpeed clips in its step"),
        Step("window weights", accumulation.weight_wrappers, "completes the gradients that are clipped"),
    ),
    "clip_grad_value_": (
        Step("clipping", clipping.wrappers, "refused under DeepSpeed"),
        Step("window weights", accumulation.weight_wrappers, "completes the gradients that are clipped"),
        Step("sharded gradients", sharded_gradients.wrappers, "in place of accelerate's, which refuses"),
    ),
    "log": (Step("memory in trackers", tracked_memory.wrappers, "adds the peaks"),),
}
_SAVING: Steps = {
    "save_state": (
        Step("observation", observe.wrappers, "around all: the phase is saving"),
        Step("step before saving", optimizer_step.wrappers, "a due step comes before weights are read"),
        Step("checkpoints", checkpoints.wrappers, "commits a temporary folder"),
        Step("pipeline stages", pipeline.wrappers, "directly around accelerate's: gathers all stages"),
    ),
    "save_model": (
        Step("observation", observe.wrappers, "around all: the phase is saving"),
        Step("step before saving", optimizer_step.wrappers, "a due step comes before weights are read"),
    ),
    "load_state": (
        Step("data alone", data_only.wrappers, "around all that loads: it runs no code of the checkpoint"),
        Step("checkpoints", checkpoints.wrappers, "loads complete checkpoints only"),
        Step("pipeline stages", pipeline.wrappers, "directly around accelerate's: to host memory"),
    ),
    "get_state_dict": (
        Step("step before saving", optimizer_step.wrappers, "a due step comes before weights are read"),
        Step("whole weights", whole_saving.wrappers, "ties the weights that follow"),
        Step("pipeline stages", pipeline.wrappers, "in place of accelerate's: the weights of all stages"),
    ),
    "unwrap_model": (
        Step("step before saving", optimizer_step.wrappers, "a due step comes before weights are read"),
        Step("compiled model", compiled_model.wrappers, "unwraps torch.compile's wrapper, too"),
    ),
    "end_training": (Step("step before saving", optimizer_step.wrappers, "a due step is made"),),
}
ACCELERATOR: Steps = {**_SETUP, **_BATCH, **_STEP, **_SAVING}
"""Of accelerate's Accelerator."""

TRAINER: Steps = {
    "__init__": (
        Step("changed model", changed_model.trainer_wrappers, "before the model is split or moved"),
        Step("pipeline stages", pipeline.trainer_wrappers, "before Trainer moves the model to its device"),
    ),
    "create_accelerator_and_postprocess": (
        Step("arguments", trainer_arguments.trainer_wrappers, "before the Accelerator is made from them"),
    ),
    "get_tp_size": (Step("sample groups", sample_groups.trainer_wrappers, "the ranks that share samples"),),
    "train": (
        Step(
            "optimizer", trainer_optimizer.trainer_wrappers, "records the script's before DeepSpeed's set-up"
        ),
        Step("arguments", trainer_arguments.trainer_wrappers, "before train() reads them again"),
        Step("checkpoints", trainer_checkpoints.trainer_wrappers, "before train() loads one"),
        Step("memory in trackers", tracked_memory.trainer_wrappers, "before train() logs anything"),
    ),
    "create_optimizer": (Step("optimizer", trainer_optimizer.trainer_wrappers, "the script's own"),),
    "create_scheduler": (Step("optimizer", trainer_optimizer.trainer_wrappers, "the script's own"),),
    RUN_EPOCH: (Step("checkpoints", trainer_checkpoints.trainer_wrappers, "no step after the last"),),
    "compute_loss": (Step("loss", trainer_loss.trainer_wrappers, "its weight in the step"),),
    "evaluate": (Step("observation", observe.trainer_wrappers, "the phase"),),
    "predict": (Step("observation", observe.trainer_wrappers, "the phase"),),
    "prediction_step": (Step("pipeline stages", pipeline.trainer_wrappers, "logits stay on the last stage"),),
    "save_model": (
        Step("observation", observe.trainer_wrappers, "around all: the phase is saving"),
        Step("whole weights", whole_saving.trainer_wrappers, "before Trainer sees how checkpoints are saved"),
        Step("pipeline stages", pipeline.trainer_wrappers, "gathers the weights of all stages"),
    ),
    SAVE_CHECKPOINT: (
        Step("observation", observe.trainer_wrappers, "around all: the phase is saving"),
        Step("checkpoints", trainer_checkpoints.trainer_wrappers, "commits a temporary folder"),
        Step("pipeline stages", pipeline.trainer_wrappers, "gathers all stages"),
    ),
    LOAD_MODEL: (
        Step(
            "data alone",
            data_only.trainer_wrappers,
            "around all that loads: it runs no code of the checkpoint",
        ),
    ),
    LOAD_OPTIMIZER: (
        Step(
            "data alone",
            data_only.trainer_wrappers,
            "around all that loads: it runs no code of the checkpoint",
        ),
        Step("pipeline stages", pipeline.trainer_wrappers, "loads to host memory"),
    ),
}
"""Of transformers' Trainer."""

CALLBACKS: Steps = {
    "on_train_begin": (
        Step("stop on a signal", stop_signal.callback_wrappers, "only records that a Trainer trains"),
        Step("observation", observe.callback_wrappers, "counts from the step that is resumed"),
    ),
    "on_step_end": (
        Step("trial", trial.callback_wrappers, "after what follows: a trial saves nothing"),
        Step("stop on a signal", stop_signal.callback_wrappers, "after the callbacks: saves now"),
    ),
    "on_epoch_end": (Step("trial", trial.callback_wrappers, "after the callbacks: a trial saves nothing"),),
    "on_save": (
        Step("stop on a signal", stop_signal.callback_wrappers, "after what follows: ends the process"),
        Step("observation", observe.callback_wrappers, "records the checkpoint"),
    ),
}
"""Of transformers' CallbackHandler."""

DATA_LOADER: Steps = {
    "__iter__": (
        Step("order of samples", sample_order.data_loader_wrappers, "keeps the random state that was loaded"),
        Step("observation", observe.data_loader_wrappers, "records batches"),
    ),
}
"""Of torch's DataLoader."""

ENGINE: Steps = {
    "__init__": (
        Step("expert modules", expert_modules.engine_wrappers, "before the engine partitions the model"),
        Step("partitioned models", partitioned_models.engine_wrappers, "after the rest: there is an engine"),
        Step("observation", observe.engine_wrappers, "the phase is preparing"),
    ),
    BROADCAST_MODEL: (Step("scalars", scalars.engine_wrappers, "only while weights are broadcast"),),
    "forward": (Step("sequence shards", sequence_shards.engine_wrappers, "splits the batch over the group"),),
    "backward": (Step("observation", observe.engine_wrappers, "the phase"),),
    "step": (Step("observation", observe.engine_wrappers, "the phase, and the number of steps"),),
    "load_checkpoint": (
        Step(
            "data alone",
            data_only.engine_wrappers,
            "around all that loads: it runs no code of the checkpoint",
        ),
        Step("converted checkpoint", elastic_resume.engine_wrappers, "before the engine reads it"),
        Step("observation", observe.engine_wrappers, "counts from the step that was loaded"),
    ),
    "save_checkpoint": (Step("observation", observe.engine_wrappers, "the phase"),),
}
"""Of DeepSpeed's engine."""

TORCH_CLIPPING: Steps = {
    "clip_grad_norm_": (
        Step("clipping", clipping.torch_wrappers, "the plan's norm; DeepSpeed clips in its step"),
        Step("pipeline stages", pipeline.clipping_wrappers, "the norm over all stages"),
    ),
    "clip_grad_value_": (Step("clipping", clipping.torch_wrappers, "refused under DeepSpeed"),),
}
"""Of torch.nn.utils."""
