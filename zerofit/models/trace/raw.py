"""RawLog: the log of one run, with integers for one micro-batch size, or with functions of that size."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from zerofit.core.allocation_log import Event

if TYPE_CHECKING:
    from zerofit.core.allocation_log import CostKind, Pass, TensorKind, TracedParameter
    from zerofit.core.strategy import Precision

CALL = 8
"""An additional event beside allocation_log.Event: an operator call; the argument is its index in calls."""


_Number = TypeVar("_Number")
"""int for a run at one size; affine.Affine for a log of many sizes."""


@dataclass(frozen=True, slots=True)
class OperatorCall(Generic[_Number]):
    """The work of one operator call."""

    operator: int
    kind: CostKind
    during: Pass
    precision: Precision
    flops: _Number
    num_bytes: _Number


@dataclass(slots=True, kw_only=True)
class Skeleton:
    """The part of a trace that does not depend on the micro-batch size: the whole model with all layers."""

    modules: tuple[str, ...]
    module_parameters: tuple[tuple[int, ...], ...]
    parameters: tuple[TracedParameter, ...]
    buffer_bytes: tuple[int, ...]


@dataclass(slots=True)
class RawLog(Generic[_Number]):
    """Columns of storages, events and calls, as recorded."""

    kinds: list[TensorKind] = field(default_factory=list)
    num_bytes: list[_Number] = field(default_factory=list)
    modules: list[int] = field(default_factory=list)
    operators: list[int] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    arguments: list[int] = field(default_factory=list)
    calls: list[OperatorCall[_Number]] = field(default_factory=list)
    gradient_storages: dict[int, int] = field(default_factory=dict)
    """From parameter to storage."""
    operator_names: list[str] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)
    """The CUDA stream of each storage; empty if none is known."""

    def note(self, code: int, argument: int) -> None:
        """Append one event."""
        self.codes.append(code)
        self.arguments.append(argument)


def sort_frees(codes: list[int], arguments: list[int]) -> None:
    """Sort storages that are freed together by their allocation.

    Autocast frees its copies of weights in the arbitrary order of a hash table; the order does not matter to
    an allocator.
    """
    start = 0
    for place in range(len(codes) + 1):
        if place == len(codes) or codes[place] != Event.FREE:
            if place - start > 1:
                arguments[start:place] = sorted(arguments[start:place])
            start = place + 1
