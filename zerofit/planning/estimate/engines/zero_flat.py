"""FlatGroup: the parameters that train, one behind the other in a flat buffer, cut into one part a rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zerofit.planning.estimate.engines.engine import Setup

_ALIGNMENT = 2
"""Elements that the flat buffer is padded to a multiple of, times the ranks, so that each part begins at four
bytes (deepspeed 0.19.8, runtime/zero/stage_1_and_2.py:362, nccl_start_alignment_factor)."""


@dataclass(frozen=True, kw_only=True)
class FlatGroup:
    """What ZeRO stages 1 and 2 partition: one parameter group, in the order of model.parameters()."""

    sizes: tuple[int, ...]
    """Elements of each parameter that trains."""
    num_ranks: int

    @cached_property
    def num_elements(self) -> int:
        """All of them, without padding."""
        return sum(self.sizes)

    @cached_property
    def padded_elements(self) -> int:
        """Elements of the flat buffer."""
        step = _ALIGNMENT * self.num_ranks
        return -(-self.num_elements // step) * step

    @property
    def padding(self) -> int:
        """Elements of zeros at its end."""
        return self.padded_elements - self.num_elements

    @property
    def partition_elements(self) -> int:
        """Elements of one rank's part."""
        return self.padded_elements // self.num_ranks

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return tuple(accumulate(self.sizes, initial=0))

    def slices_of(self, position: int) -> list[tuple[int, int]]:
        """Return (rank, elements) for each part that the parameter at this position reaches into."""
        start, end, part = self._starts[position], self._starts[position + 1], self.partition_elements
        ranks = range(start // part, (end - 1) // part + 1)
        return [(rank, min(end, (rank + 1) * part) - max(start, rank * part)) for rank in ranks]

    def held_by(self, rank: int) -> dict[int, int]:
        """Return the positions of the parameters that reach into a rank's part, and how many elements do."""
        found = {}
        for position in range(len(self.sizes)):
            for owner, elements in self.slices_of(position):
                if owner == rank:
                    found[position] = elements
        return found

    @cached_property
    def touched_elements(self) -> tuple[int, ...]:
        """By rank, the elements of all parameters, whole, that reach into its part."""
        touched = [0] * self.num_ranks
        for position, size in enumerate(self.sizes):
            for rank, _ in self.slices_of(position):
                touched[rank] += size
        return tuple(touched)

    @property
    def fullest_rank(self) -> int:
        """The rank whose gradients take most."""
        return self.touched_elements.index(max(self.touched_elements, default=0)) if self.sizes else 0


def flattens_on_gpu(setup: Setup, flat_bytes: int) -> bool:
    """Return whether the flat buffer is made on the GPU, beside the whole model; else it is on the host.

    Source: deepspeed 0.19.8, runtime/zero/stage_1_and_2.py:451.
    """
    log, room = setup.log, setup.gpu_memory_bytes
    weights = sum(one.num_elements * one.bytes_per_element for one in log.parameters)
    return room is None or room - weights - sum(log.buffer_bytes) >= flat_bytes


def merged(slices: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return slices with neighbours of one rank made one."""
    found: list[tuple[int, int]] = []
    for rank, elements in slices:
        if found and found[-1][0] == rank:
            found[-1] = rank, found[-1][1] + elements
        else:
            found.append((rank, elements))
    return found


def sub_groups(parts: list[int], limit: int) -> list[int]:
    """Return the elements that ZeRO-3's optimizer steps at a time.

    Args:
        parts: elements of one rank's part of each parameter.
        limit: sub_group_size.

    Source: deepspeed 0.19.8, runtime/zero/stage3.py:1210 (_create_fp16_sub_groups).
    """
    if limit >= sum(parts):
        return [sum(parts)]
    groups, size = [], 0
    for part in parts:
        size += part
        if size >= limit:
            groups.append(size)
            size = 0
    return [*groups, size] if size else groups
