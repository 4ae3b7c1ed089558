"""Shares the blocks of a model among the stages of a pipeline."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from zerofit.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence


def fill_stages(
    num_blocks: int, num_stages: int, *, head: float, most: Sequence[float] = ()
) -> tuple[int, ...]:
    """Return the blocks of each stage, at least 1, with which the slowest stage is as fast as it can be.

    Args:
        num_blocks: of the model, at least as many as stages.
        num_stages: of the pipeline.
        head: time of the model's head, which the last stage runs too, in blocks.
        most: blocks of each stage that its memory holds; empty for no limit.

    Returns:
        Nothing, an empty tuple, where the stages can't hold all blocks.
    """
    room = most or (math.inf,) * num_stages
    blocks = [1] * num_stages
    if num_blocks > sum(room) or min(room) < 1:
        return ()
    for _ in range(num_blocks - num_stages):
        # The later of two equal stages: under 1F1B it has fewer micro-batches in flight.
        stage = min(
            (stage for stage in range(num_stages) if blocks[stage] < room[stage]),
            key=lambda stage: (blocks[stage] + head * (stage == num_stages - 1), -stage),
        )
        blocks[stage] += 1
    return tuple(blocks)


def stages_of_rank(place: int, *, num_stages: int, num_ranks: int) -> range:
    """Return the stages that a rank of a pipeline holds: interleaved ones go round-robin over the ranks."""
    return range(place, num_stages, num_ranks)


def too_few_blocks(num_stages: int, num_blocks: int, *, model: str) -> UserError:
    """Return the refusal of more stages than blocks.

    Args:
        num_stages: of the pipeline.
        num_blocks: of the model.
        model: its name, or its class.
    """
    return UserError(
        "pipeline-too-long",
        "a pipeline has at most as many stages as the model has blocks",
        found=f"{num_stages} stages and {num_blocks} blocks of {model}",
        why="a stage holds whole blocks",
        fix=f"take at most {num_blocks} stages: a smaller --pipeline-parallel-size, or fewer on each rank",
    )
