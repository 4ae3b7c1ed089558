"""Stage: what one rank of a pipeline runs, in which order, and its part of a log's events."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from zerofit.core.allocation_log import Event
from zerofit.core.stage_blocks import stages_of_rank

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.core.allocation_log import AllocationLog
    from zerofit.core.strategy import Strategy

PassEvents = tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]
"""Codes with their arguments: of a forward pass, and of its backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A rank's stages of a pipeline, mostly one, whose log is played, and the schedule that they run by."""

    number: int
    """The first of them, counted from 0; also the rank's place in the pipeline."""
    num_ranks: int
    """Of the pipeline."""
    blocks: tuple[int, ...] = ()
    """Blocks of each of them where there are several, whose log is one; else empty."""
    passes: int
    """Forward passes of the model in an optimizer step, which the script counts."""
    hidden_bytes_per_sample: int
    """Of the hidden states between two stages, for a row of a micro-batch."""

    def micro_batches(self, strategy: Strategy) -> int:
        """Return the micro-batches that a forward pass of the model is cut into."""
        return max(1, (strategy.gradient_accumulation_steps or 1) // self.passes)

    @property
    def num_stages(self) -> int:
        """Of the whole pipeline."""
        return self.num_ranks * self.stages_per_rank

    @property
    def stages_per_rank(self) -> int:
        """That this rank holds, as every other."""
        return len(self.blocks) or 1

    @property
    def numbers(self) -> range:
        """The stages that this rank holds."""
        return stages_of_rank(self.number, num_stages=self.num_stages, num_ranks=self.num_ranks)

    def in_flight(self, strategy: Strategy) -> int:
        """Return the forward passes of stages that this rank runs before the first backward pass.

        Source: torch/distributed/pipelining/schedules.py, Schedule1F1B and _get_warmup_ops (2.13).
        """
        behind = self.num_ranks - 1 - self.number
        if not self.blocks:
            return min(self.micro_batches(strategy), behind + 1)
        ahead = (self.stages_per_rank - 1) * self.num_ranks + 2 * behind + 1
        return min(self.micro_batches(strategy) * self.stages_per_rank, ahead)

    def least_played(self, ahead: int) -> int:
        """Return how many micro-batches have all peaks of a pass: any more would repeat what these do.

        Args:
            ahead: forward passes before the first backward pass.
        """
        if not self.blocks:
            return ahead + 2
        rounds = math.ceil(ahead / (self.stages_per_rank * self.num_ranks)) + 2
        return rounds * self.num_ranks

    def passes_in_order(self, number: int, ahead: int) -> Iterator[tuple[bool, int, int]]:
        """Yield of each pass whether it runs forward, its micro-batch, and which of this rank's stages runs.

        Args:
            number: micro-batches, a multiple of the ranks where this rank holds several stages.
            ahead: forward passes before the first backward pass.
        """
        turns = list(self.turns(number))
        for step in range(len(turns) + ahead):
            if step >= ahead:
                index, place = turns[step - ahead]
                yield False, index, self.stages_per_rank - 1 - place
            if step < len(turns):
                yield True, *turns[step]

    def turns(self, number: int) -> Iterator[tuple[int, int]]:
        """Yield the micro-batch and the stage, of this rank's, of each forward pass in order.

        Backward passes come in the same order, with the stages reversed.

        Args:
            number: micro-batches, a multiple of the ranks where this rank holds several stages.
        """
        rounds = range(0, number, self.num_ranks if self.blocks else 1)
        for first in rounds:
            for stage in range(self.stages_per_rank):
                for index in range(first, min(first + rounds.step, number)):
                    yield index, stage


def events_by_stage(
    events: PassEvents, log: AllocationLog, blocks: tuple[int, ...]
) -> tuple[PassEvents, ...]:
    """Cut the events of a rank's blocks where its stages begin.

    Args:
        events: of all its blocks, among them that a block is entered, and left in the backward pass.
        blocks: of each stage; empty for one.
    """
    if not blocks:
        return (events,)
    modules = _block_modules(log)
    firsts = [modules[first] for first in accumulate(blocks[:-1])]
    forward, backward = events
    begins = [0, *(forward.index((Event.FORWARD_ENTER, one)) for one in firsts), len(forward)]
    passes = [forward[start:end] for start, end in pairwise(begins)]
    rest = list(backward)
    stages: list[PassEvents] = []
    for passed, first in zip(reversed(passes), (*reversed(firsts), None), strict=True):
        left = (Event.BACKWARD_LEAVE, first)
        ends = rest.index(left) + 1 if left in rest else len(rest)
        own, rest = rest[:ends], rest[ends:]
        # What is sent, an output and a gradient, is the engine's from then on.
        made = {argument for code, argument in (*passed, *own) if code == Event.ALLOCATE}
        sent = [one for one in rest if one[0] == Event.FREE and one[1] in made]
        rest = [one for one in rest if one[0] != Event.FREE or one[1] not in made]
        stages.append((passed, (*own, *sent)))
    return tuple(reversed(stages))


def _block_modules(log: AllocationLog) -> list[int]:
    """Return the modules that are blocks: those numbered in the outermost list."""
    numbered = [
        (name.count("."), module) for module, name in enumerate(log.modules) if name.split(".")[-1].isdigit()
    ]
    return [module for depth, module in numbered if depth == min(numbered)[0]]


def events_of_every_stage(events: PassEvents, log: AllocationLog) -> tuple[tuple[int, int], ...]:
    """Return what is made before the first block and kept for the backward pass, but for embeddings."""
    forward, backward = events
    ends = forward.index((Event.FORWARD_ENTER, _block_modules(log)[0]))
    freed = {argument for code, argument in backward if code == Event.FREE}
    return tuple(
        (code, argument)
        for code, argument in forward[:ends]
        if code == Event.ALLOCATE
        and argument in freed
        and not log.module_parameters[log.storages.modules[argument]]
    )
