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
    from collections.abc import Iterable, Iterator, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A prompt, as far as it matters to the order of calls."""

    index: int
    """Its place among all prompts, from 0."""
    num_tokens: int
    max_new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Prompts that are generated in one call."""

    number: int
    """Its place among all batches, from 0: what its random numbers are seeded with."""
    indices: tuple[int, ...]
    """Places of its prompts."""
    num_tokens: int
    """Of its longest prompt: the length that the others are padded to."""
    max_new_tokens: int
    """Of each of its prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What all ranks do at one time."""

    batches: tuple[Batch | None, ...]
    """One a rank; None where it has nothing left to do."""

    @property
    def max_new_tokens(self) -> int:
        """Forward passes that this step may take: ranks go on until the last of them has ended."""
        return max(batch.max_new_tokens for batch in self.batches if batch is not None)


def make_batches(prompts: Iterable[Asked], *, batch_size: int) -> tuple[Batch, ...]:
    """Return the batches of all prompts, those that take longest first; of like length, to pad little.

    Args:
        prompts: all of them, of all ranks.
        batch_size: prompts in one call at most.
    """
    ordered = sorted(prompts, key=lambda one: (-one.max_new_tokens, -one.num_tokens, one.index))
    together = [
        group
        for _, alike in groupby(ordered, key=lambda one: one.max_new_tokens)
        for group in _cut(list(alike), batch_size)
    ]
    return tuple(
        Batch(
            number=number,
            indices=tuple(one.index for one in group),
            num_tokens=group[0].num_tokens,
            max_new_tokens=group[0].max_new_tokens,
        )
        for number, group in enumerate(together)
    )


def make_steps(
    batches: Sequence[Batch], *, world_size: int, max_positions: int | None, may_differ: bool = True
) -> tuple[Step, ...]:
    """Return the steps in which some ranks generate all batches, in their order.

    Under ZeRO-3 a rank that has ended goes on with empty passes until the last one has, and its cache grows
    with each: batches of different max_new_tokens share a step only where none outgrows the model by that.

    Args:
        batches: all of them, as make_batches orders them; each fits the model by itself.
        world_size: ranks that generate.
        max_positions: tokens of prompt and completion together that the model has positions for; None where
            there is no limit.
        may_differ: whether batches of different max_new_tokens may share a step at all; not with a cache of a
            fixed size.
    """
    steps: list[Step] = []
    together: list[Batch] = []
    for batch in batches:
        first = together[0] if together else batch
        is_alike = batch.max_new_tokens == first.max_new_tokens
        outgrows = max_positions is not None and batch.num_tokens + first.max_new_tokens > max_positions
        if len(together) == world_size or not (is_alike or (may_differ and not outgrows)):
            steps.append(_step(together, world_size))
            together = []
        together.append(batch)
    return (*steps, _step(together, world_size)) if together else tuple(steps)


def _step(together: Sequence[Batch], world_size: int) -> Step:
    return Step(batches=(*together, *(None for _ in range(world_size - len(together)))))


def _cut(alike: Sequence[Asked], batch_size: int) -> Iterator[Sequence[Asked]]:
    for begin in range(0, len(alike), batch_size):
        yield alike[begin : begin + batch_size]
