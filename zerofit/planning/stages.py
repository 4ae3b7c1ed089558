"""Distributes a pipeline's blocks over its stages: by time, or by memory if equal stages do not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.core.stage_blocks import fill_stages, too_few_blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerofit.core.facts import ModelFacts
    from zerofit.core.plan import Topology
    from zerofit.core.strategy import Strategy
    from zerofit.planning.problem import Problem
    from zerofit.planning.training_estimator import TrainingEstimator


def with_stage_blocks(topology: Topology, model: ModelFacts) -> Topology:
    """Return the topology with the blocks of each stage, if ranks hold several stages.

    Raises:
        UserError: the model has fewer blocks than stages.
    """
    num_stages, num_blocks = topology.num_stages, model.num_layers
    if not topology.is_interleaved or topology.stage_blocks or not num_blocks:
        return topology
    if num_blocks < num_stages:
        raise too_few_blocks(num_stages, num_blocks, model=model.name)
    return replace(topology, stage_blocks=fill_stages(num_blocks, num_stages, head=_head_in_blocks(model)))


def share_by_memory(
    problem: Problem, strategy: Strategy, estimator_of: Callable[[Problem], TrainingEstimator]
) -> Problem | None:
    """Return the problem with its blocks distributed so that each stage fits with a strategy.

    Blocks are equal, so each adds the same memory to its stage. Of all distributions that fit, the slowest
    stage is the fastest possible.

    Args:
        problem: with pipeline stages of equal time.
        strategy: the one nearest to fitting.
        estimator_of: estimates the memory of a problem's stages.

    Returns:
        None without a pipeline, or if no distribution fits.
    """
    topology, num_blocks = problem.topology, problem.model.num_layers
    num_stages, head = topology.pipeline_parallel_size, _head_in_blocks(problem.model)
    if num_stages == 1 or topology.stage_blocks or num_blocks < num_stages:
        return None
    equal = fill_stages(num_blocks, num_stages, head=head)

    def stage_bytes(blocks: tuple[int, ...]) -> tuple[int, ...]:
        return estimator_of(_with_blocks(problem, blocks)).stage_bytes(strategy)

    # Measure each stage with one block less, and the last with the rest.
    fewer = tuple(max(1, number - 1) for number in equal[:-1])
    other = (*fewer, num_blocks - sum(fewer))
    most = []
    for count, changed, full, then in zip(equal, other, stage_bytes(equal), stage_bytes(other), strict=True):
        per_block = (full - then) / (count - changed) if count != changed else 0
        most.append(count + (problem.device_bytes - full) // per_block if per_block > 0 else count)
    blocks = fill_stages(num_blocks, num_stages, head=head, most=most)
    return _with_blocks(problem, blocks) if blocks not in ((), equal) else None


def _with_blocks(problem: Problem, blocks: tuple[int, ...]) -> Problem:
    return replace(problem, topology=replace(problem.topology, stage_blocks=blocks))


def _head_in_blocks(model: ModelFacts) -> float:
    """Return the parameters of the head as a multiple of a block's."""
    block = model.num_largest_layer_parameters
    return model.vocab_size * model.hidden_size / block if block else 0.0
