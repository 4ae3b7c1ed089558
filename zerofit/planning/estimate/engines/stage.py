"""Stage: the pipeline stages of one rank, their schedule, and their part of a log's events."""

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
"""(code, argument) of each event of a forward pass, and of its backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A rank's stage of a pipeline, or several interleaved ones that share a log, and their schedule."""

    number: int
    """The rank's first stage, counted from 0; also the rank's place in the pipeline."""
    num_ranks: int
    """Ranks of the pipeline."""
    blocks: tuple[int, ...] = ()
    """Blocks of each of the rank's interleaved stages; empty for a single stage."""
    passes: int
    """Forward passes of the model per optimizer step, as the script counts them."""
    hidden_bytes_per_sample: int
    """Bytes of the hidden states between two stages, per row of a micro-batch."""

    def micro_batches(self, strategy: Strategy) -> int:
        """Return the micro-batches per forward pass of the model."""
        return max(1, (strategy.gradient_accumulation_steps or 1) // self.passes)

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.num_ranks * self.stages_per_rank

    @property
    def stages_per_rank(self) -> int:
        return len(self.blocks) or 1

    @property
    def numbers(self) -> range:
        """The stages that this rank holds."""
        return stages_of_rank(self.number, num_stages=self.num_stages, num_ranks=self.num_ranks)

    def in_flight(self, strategy: Strategy) -> int:
        """Return the warmup passes: forward passes of stages before the rank's first backward pass.

        Source: torch/distributed/pipelining/schedules.py, Schedule1F1B and _get_warmup_ops (2.13).
        """
        behind = self.num_ranks - 1 - self.number
        if not self.blocks:
            return min(self.micro_batches(strategy), behind + 1)
        ahead = (self.stages_per_rank - 1) * self.num_ranks + 2 * behind + 1
        return min(self.micro_batches(strategy) * self.stages_per_rank, ahead)

    def least_played(self, ahead: int) -> int:
        """Return the number of micro-batches that reach every peak of a pass; more would only repeat them.

        Args:
            ahead: forward passes before the first backward pass.
        """
        if not self.blocks:
            return ahead + 2
        rounds = math.ceil(ahead / (self.stages_per_rank * self.num_ranks)) + 2
        return rounds * self.num_ranks

    def passes_in_order(self, number: int, ahead: int) -> Iterator[tuple[bool, int, int]]:
        """Yield (is forward, micro-batch, place among this rank's stages) of each pass in order.

        Args:
            number: micro-batches, a multiple of the ranks for interleaved stages.
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
        """Yield (micro-batch, place among this rank's stages) of each forward pass in order.

        Backward passes run in the same order, with the stages reversed.

        Args:
            number: micro-batches, a multiple of the ranks for interleaved stages.
        """
        rounds = range(0, number, self.num_ranks if self.blocks else 1)
        for first in rounds:
            for stage in range(self.stages_per_rank):
                for index in range(first, min(first + rounds.step, number)):
                    yield index, stage


def events_by_stage(
    events: PassEvents, log: AllocationLog, blocks: tuple[int, ...]
) -> tuple[PassEvents, ...]:
    """Split the events of a rank's blocks into those of its stages.

    Args:
        events: of all its blocks, with FORWARD_ENTER and BACKWARD_LEAVE of each.
        blocks: of each stage; empty for a single stage.
    """
    if not blocks:
        return (events,)
    modules = _block_modules(log)
    firsts = [modules[first] for first in accumulate(blocks[:-1])]
    forward, backward = events
    begins = [0, *(forward.index((Event.FORWARD_ENTER, start)) for start in firsts), len(forward)]
    passes = [forward[start:end] for start, end in pairwise(begins)]
    rest = list(backward)
    stages: list[PassEvents] = []
    for passed, first in zip(reversed(passes), (*reversed(firsts), None), strict=True):
        left = (Event.BACKWARD_LEAVE, first)
        ends = rest.index(left) + 1 if left in rest else len(rest)
        own, rest = rest[:ends], rest[ends:]
        # The engine frees what is sent: an output and a gradient.
        made = {argument for code, argument in (*passed, *own) if code == Event.ALLOCATE}
        sent = [event for event in rest if event[0] == Event.FREE and event[1] in made]
        rest = [event for event in rest if event[0] != Event.FREE or event[1] not in made]
        stages.append((passed, (*own, *sent)))
    return tuple(reversed(stages))


def _block_modules(log: AllocationLog) -> list[int]:
    """Return the modules of the blocks: those numbered in the outermost list."""
    numbered = [
        (name.count("."), module) for module, name in enumerate(log.modules) if name.split(".")[-1].isdigit()
    ]
    return [module for depth, module in numbered if depth == min(numbered)[0]]


def events_of_every_stage(events: PassEvents, log: AllocationLog) -> tuple[tuple[int, int], ...]:
    """Return the allocations before the first block that live until the backward pass, except embeddings."""
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
