"""Turns a model into this rank's stages of a pipeline, and makes forward() and generate() run all stages."""

from __future__ import annotations

import functools
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from zerofit.core.errors import UserError
from zerofit.core.stage_blocks import stages_of_rank
from zerofit.models.changes.stages import (
    blocks_by_stage,
    check_stages,
    cut,
    refuse_router_loss,
    share_blocks,
)
from zerofit.ranks.meeting import meet
from zerofit.ranks.script_line import script_line
from zerofit.training.pipeline.groups import make_groups
from zerofit.training.pipeline.pipeline import Pipeline
from zerofit.training.pipeline.random_states import synchronize_random_state
from zerofit.training.pipeline.whole_state import WholeStates, name_parameters
from zerofit.training.setup.initial_weights import broadcast_initial_weights

if TYPE_CHECKING:
    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings


def make_pipeline(model: Any, settings: AppliedSettings, changes: Changes) -> WholeStates:
    """Reduce a model to this rank's stages, and make its forward pass run all stages; all ranks call it.

    Args:
        model: a causal language model of transformers, whole on every rank.
        settings: the plan's.
        changes: receives changes.

    Raises:
        UserError: it is not a stack of blocks, has adapters, or a loss that stages can't compute.
    """
    if getattr(model, "peft_config", None):
        raise UserError(
            "pipeline-adapters",
            "a model with adapters can't be split into pipeline stages",
            found=f"{type(model).__name__} with peft adapters",
            why="what peft saves and loads of a single stage is untested",
            fix="train without adapters, or without --pipeline-parallel-size",
        )
    num_ranks = settings.pipeline_parallel_size
    topology = settings.plan.topology
    num_stages = num_ranks * topology.pipeline_stages_per_rank
    bounds = share_blocks(model, num_stages, topology.stage_blocks)
    refuse_router_loss(model, {})
    returns_tuples = check_stages(model, bounds)
    groups = make_groups(num_ranks)
    broadcast_initial_weights(model, changes)
    name_parameters(model)
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    own = stages_of_rank(groups.place, num_stages=num_stages, num_ranks=num_ranks)
    stages = cut(model, own, bounds, returns_tuples=returns_tuples)
    is_end = groups.place in (0, num_ranks - 1)
    pipeline = Pipeline(
        model=model,
        num_stages=num_stages,
        stages=stages,
        forward=model.forward,
        groups=groups,
        changes=changes,
        most_rows=settings.most_rows,
        tied=model.get_input_embeddings().weight if is_tied and is_end else None,
    )
    _run_all_stages(pipeline, limit_s=settings.plan.generate_limit_s)
    interleaved = f" interleaved on {num_ranks} ranks" if num_stages > num_ranks else ""
    changes.add(
        f"the model trains in {num_stages} pipeline stages{interleaved}, of blocks "
        f"{blocks_by_stage(bounds)}: a training forward pass also runs the backward pass, and "
        "returns only the loss"
    )
    return WholeStates(pipeline, limit_s=settings.plan.generate_limit_s)


def _run_all_stages(pipeline: Pipeline, *, limit_s: float) -> None:
    """Make the model's forward() and generate() run all stages.

    Both are bound methods, which show whether a copy of the model (a moving average of its weights) is
    called. They are excluded from torch.compile, which could reorder communication differently on each rank.
    """
    model, kind = pipeline.model, type(pipeline.model)

    @functools.wraps(kind.forward)
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self: Any, input_ids: Any = None, **inputs: Any) -> Any:
        _refuse_copy(self, model)
        return pipeline(input_ids, **inputs)

    model.forward = MethodType(forward, model)
    if not hasattr(kind, "generate"):
        return

    @functools.wraps(kind.generate)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_copy(self, model)
        meet("model.generate", line=script_line(), limit_s=limit_s, ranks=pipeline.groups.ranks)
        _refuse_time_limit(model, args, kwargs)
        synchronize_random_state(pipeline.groups)
        return kind.generate(self, *args, **{**kwargs, "use_cache": False})

    model.generate = MethodType(generate, model)


def _refuse_copy(used: Any, model: Any) -> None:
    if used is not model:
        raise UserError(
            "pipeline-copied-model",
            "a copy of a model in pipeline stages can't run",
            found=f"a copy of the {type(model).__name__} that trains",
            why="it only holds this rank's blocks, and no other rank runs the rest",
            fix="train without --pipeline-parallel-size, or without a moving average of the weights",
        )


def _refuse_time_limit(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse max_time: stages would stop after different tokens, and wait for each other forever."""
    configs = (*args, kwargs.get("generation_config"), getattr(model, "generation_config", None))
    said = [kwargs.get("max_time"), *(getattr(config, "max_time", None) for config in configs)]
    if limit := next((value for value in said if value is not None), None):
        raise UserError(
            "pipeline-generates-by-clock",
            "max_time can't be used in pipeline stages",
            found=f"generate() with max_time={limit}",
            why="each stage reads its own clock, and one that stops earlier leaves the others waiting",
            fix="use max_new_tokens instead of max_time",
        )
