"""Distribution of prompts over batches, ranks and steps, with the same number of steps on every rank.

A batch is one call of `model.generate`. A step is one such call on every rank at the same time; a rank
without a batch in a step participates with a dummy. Batches, and therefore completions, do not depend on
the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBatch:
    """Prompts generated in one call."""

    number: int
    """Its index among all batches, which seeds its random numbers."""
    indices: tuple[int, ...]
    """Indices of its prompts."""
    num_tokens: int
    """Tokens of its longest prompt, to which the others are padded."""
    max_new_tokens: int
    """Of each of its prompts."""


def make_batches(prompts: Sequence[tuple[int, int]], *, batch_size: int) -> tuple[PromptBatch, ...]:
    """Return the batches of all prompts, longest first, of similar length to save padding.

    Args:
        prompts: tokens and max_new_tokens of each prompt of all ranks.
    """
    places = sorted(range(len(prompts)), key=lambda index: (-prompts[index][1], -prompts[index][0], index))
    groups = [
        alike[begin : begin + batch_size]
        for _, group in groupby(places, key=lambda index: prompts[index][1])
        for alike in [tuple(group)]
        for begin in range(0, len(alike), batch_size)
    ]
    return tuple(
        PromptBatch(
            number=number,
            indices=indices,
            num_tokens=prompts[indices[0]][0],
            max_new_tokens=prompts[indices[0]][1],
        )
        for number, indices in enumerate(groups)
    )


def make_steps(
    batches: Sequence[PromptBatch], *, world_size: int, max_positions: int | None, may_differ: bool = True
) -> tuple[tuple[PromptBatch | None, ...], ...]:
    """Return the batches of each step by rank; None if a rank has nothing left to do.

    Under ZeRO-3 a finished rank continues with empty passes until the last one has finished, and its cache
    grows with each: batches of different max_new_tokens share a step only if none exceeds the model's
    positions by that.

    Args:
        max_positions: the model's maximum of prompt and completion tokens together; None if unlimited.
        may_differ: whether batches of different max_new_tokens may share a step at all; not with a cache of
            fixed size.
    """
    steps: list[list[PromptBatch | None]] = []
    first: PromptBatch | None = None
    for batch in batches:
        fits = first is not None and (
            batch.max_new_tokens == first.max_new_tokens
            or (
                may_differ
                and (max_positions is None or batch.num_tokens + first.max_new_tokens <= max_positions)
            )
        )
        if not fits or len(steps[-1]) == world_size:
            first = batch
            steps.append([])
        steps[-1].append(batch)
    return tuple((*step, *[None] * (world_size - len(step))) for step in steps)
