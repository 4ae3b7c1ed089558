"""Which prompts are generated together, on which rank, in which step: the same number of steps on every rank.

A batch is what one call of `model.generate` takes. A step is one such call on every rank at the same time; a
rank that has no batch in a step takes part in it with a dummy. Batches do not depend on the number of ranks,
so that what is generated doesn't either.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBatch:
    """Prompts that are generated in one call."""

    number: int
    """Its place among all batches, from 0: what its random numbers are seeded with."""
    indices: tuple[int, ...]
    """Places of its prompts."""
    num_tokens: int
    """Of its longest prompt: the length that the others are padded to."""
    max_new_tokens: int
    """Of each of its prompts."""


def make_batches(prompts: Sequence[tuple[int, int]], *, batch_size: int) -> tuple[PromptBatch, ...]:
    """Return the batches of all prompts, those that take longest first; of like length, to pad little.

    Args:
        prompts: tokens and max_new_tokens of each, of all ranks.
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
    """Return each step's batch of each rank, in order; None where a rank has nothing left to do.

    Under ZeRO-3 a rank that has ended goes on with empty passes until the last one has, and its cache grows
    with each: batches of different max_new_tokens share a step only where none outgrows the model by that.

    Args:
        max_positions: tokens of prompt and completion together that the model has positions for; None where
            there is no limit.
        may_differ: whether batches of different max_new_tokens may share a step at all; not with a cache of a
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
