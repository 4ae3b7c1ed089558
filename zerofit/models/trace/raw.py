"""RawLog: the log of one run, with plain numbers at one micro-batch size, or with functions of that size."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from zerofit.core.allocation_log import Event

if TYPE_CHECKING:
    from zerofit.core.allocation_log import CostKind, Pass, TensorKind, TracedParameter
    from zerofit.core.strategy import Precision

CALL = 8
"""An event beside those of allocation_log.Event: an operator was called; its index in calls."""


_Number = TypeVar("_Number")
"""int for a run at one size; for a log that holds for many, what affine.Affine says."""


@dataclass(frozen=True, slots=True)
class OperatorCall(Generic[_Number]):
    """The work of one call of an operator."""

    operator: int
    kind: CostKind
    during: Pass
    precision: Precision
    flops: _Number
    num_bytes: _Number


@dataclass(slots=True, kw_only=True)
class Skeleton:
    """The part of a trace that is the same at every micro-batch size: the whole model, all its layers."""

    modules: tuple[str, ...]
    module_parameters: tuple[tuple[int, ...], ...]
    parameters: tuple[TracedParameter, ...]
    buffer_bytes: tuple[int, ...]


@dataclass(slots=True)
class RawLog(Generic[_Number]):
    """Columns of storages, events and calls, as they were seen."""

    kinds: list[TensorKind] = field(default_factory=list)
    num_bytes: list[_Number] = field(default_factory=list)
    modules: list[int] = field(default_factory=list)
    operators: list[int] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    arguments: list[int] = field(default_factory=list)
    calls: list[OperatorCall[_Number]] = field(default_factory=list)
    gradient_storages: dict[int, int] = field(default_factory=dict)
    """Parameter to storage."""
    operator_names: list[str] = field(default_factory=list)

    def note(self, code: int, argument: int) -> None:
        """Append one event."""
        self.codes.append(code)
        self.arguments.append(argument)


def sort_frees(codes: list[int], arguments: list[int]) -> None:
    """Put storages that die together in the order of their birth.

    Autocast lets go of its copies of weights in the order of a hash table, another one each time; which of
    several comes first makes no difference to an allocator.
    """
    start = 0
    for place in range(len(codes) + 1):
        if place == len(codes) or codes[place] != Event.FREE:
            if place - start > 1:
                arguments[start:place] = sorted(arguments[start:place])
            start = place + 1


def leaves(value: Any) -> list[Any]:
    """Return what lies in nested lists, tuples and dicts."""
    if isinstance(value, (list, tuple)):
        return [leaf for one in value for leaf in leaves(one)]
    if isinstance(value, dict):
        return [leaf for one in value.values() for leaf in leaves(one)]
    return [value]
