"""Machines with more of what one lacks, which suggestions are tried on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.facts import AVAILABLE_SHARE
from zerofit.units import GIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.facts import Machine

GPUS_OF_A_NODE = 8
"""What a node holds at most, in nearly all that are sold or rented."""
_NUM_DOUBLINGS = 5
"""ASSUMPTION: 16 times the next larger power of two is more than is sold."""


def with_more_host_memory(machine: Machine) -> Iterator[tuple[str, Machine]]:
    """Yield nodes with rising powers of two of host memory, and the words for each."""
    size = 1 << max(machine.host_memory_bytes, GIB).bit_length()
    for _ in range(_NUM_DOUBLINGS):
        available = int(AVAILABLE_SHARE * size)
        more = replace(machine, host_memory_bytes=size, host_memory_available_bytes=available)
        yield f"{format_bytes(size)} of host memory on each node", more
        size *= 2
