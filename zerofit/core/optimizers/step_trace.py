"""StepTrace: the allocations of two steps of a script's own optimizer, run on tensors without values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """What the first two steps of an optimizer allocate and free, in order.

    Blocks are numbered in the order of their allocation. Steps list block + 1 for an allocation and
    -(block + 1) for a free.
    """

    elements: tuple[int, ...]
    """Of each parameter that it steps."""
    element_bytes: tuple[int, ...]
    """Bytes per element of each."""
    sizes: tuple[int, ...]
    """Bytes of each block."""
    states: tuple[int, ...]
    """The blocks that the optimizer keeps."""
    first: tuple[int, ...]
    second: tuple[int, ...]
    moved_bytes: int
    """Bytes that the operators of the second step read and write."""
    num_operators: int
    """Operators of the second step."""

    @cached_property
    def num_elements(self) -> int:
        """Of all parameters."""
        return sum(self.elements)

    @cached_property
    def num_bytes(self) -> int:
        """Of all parameters."""
        return sum(self.parameter_bytes)

    @cached_property
    def parameter_bytes(self) -> tuple[int, ...]:
        """Of each parameter, in ascending order."""
        return tuple(
            sorted(size * width for size, width in zip(self.elements, self.element_bytes, strict=True))
        )

    @cached_property
    def state_bytes(self) -> int:
        """Of all states."""
        return sum(self.sizes[block] for block in self.states)

    @cached_property
    def temporary_bytes(self) -> int:
        """The most that a step holds beside the states."""
        kept, held, most = frozenset(self.states), 0, 0
        for step in (self.first, self.second):
            for entry in step:
                block = abs(entry) - 1
                if block not in kept:
                    held += self.sizes[block] if entry > 0 else -self.sizes[block]
                    most = max(most, held)
        return most


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSteps:
    """The traced steps of a script's own optimizer."""

    own: StepTrace
    """On the model's tensors."""
    flat: StepTrace | None
    """On one flat fp32 tensor, as ZeRO makes of many; None if it fails there."""
