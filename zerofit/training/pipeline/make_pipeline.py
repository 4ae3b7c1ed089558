"""Makes a model one stage of a pipeline, with a forward pass that all stages run together."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zerofit.core.errors import UserError
from zerofit.training.pipeline.pipeline import Pipeline, make_groups
from zerofit.training.pipeline.stages import blocks_by_stage, check_stages, cut, share_blocks
from zerofit.training.pipeline.whole_state import WholeStates, name_parameters

if TYPE_CHECKING:
    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings


def make_pipeline(model: Any, settings: AppliedSettings, changes: Changes) -> WholeStates:
    """Cut a model down to this rank's stage, and let its forward pass run all stages; all ranks call it.

    Args:
        model: a causal language model of transformers, whole on every rank.
        settings: what the plan says.
        changes: where changes are noted.

    Raises:
        UserError: it is not a stack of blocks, or has adapters.
    """
    if getattr(model, "peft_config", None):
        raise UserError(
            "pipeline-adapters",
            "a model with adapters can't be cut into pipeline stages",
            found=f"{type(model).__name__} with adapters of peft",
            why="it is not tried yet what peft saves and loads of a stage",
            fix="train without adapters, or without --pipeline-parallel-size",
        )
    num_stages = settings.pipeline_parallel_size
    bounds = share_blocks(model, num_stages)
    check_stages(model, bounds)
    groups = make_groups(num_stages)
    _take_values_of_first_rank(model)
    name_parameters(model)
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    cut(model, groups.stage, bounds)
    is_end = groups.stage in (0, num_stages - 1)
    pipeline = Pipeline(
        model=model,
        forward=model.forward,
        groups=groups,
        rows_per_pass=settings.most_rows,
        tied=model.get_input_embeddings().weight if is_tied and is_end else None,
    )

    @functools.wraps(pipeline.forward)
    def forward(input_ids: Any = None, **inputs: Any) -> Any:
        return pipeline(input_ids, **inputs)

    model.forward = forward
    model.config.use_cache = False
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.use_cache = False
    changes.add(
        f"the model trains in {num_stages} pipeline stages, of blocks {blocks_by_stage(bounds)}: a forward "
        "pass in training runs the backward pass too, and its output has the loss alone"
    )
    return WholeStates(pipeline)


def _take_values_of_first_rank(model: Any) -> None:
    """Let all ranks start with the weights of the first, as DistributedDataParallel does."""
    is_nccl = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")
    with torch.no_grad():
        for one in model.state_dict().values():
            values = one.to(device)
            dist.broadcast(values, 0)
            one.copy_(values)
