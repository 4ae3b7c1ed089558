"""A log as an affine function of the micro-batch size, fitted to runs at two sizes."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from zerofit.core.allocation_log import AllocationLog, Event, OperatorCost, Storages
from zerofit.models.trace.raw import CALL, RawLog

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerofit.models.trace.raw import OperatorCall, Skeleton

Affine = tuple[int, int]
"""A number as a constant and a coefficient per sample."""
AffineLog = RawLog[Affine]
"""A log with two numbers for each one that depends on the micro-batch size."""


def fit(low: RawLog[int], high: RawLog[int], samples: tuple[int, int]) -> AffineLog | None:
    """Return the log that matches runs at two sizes, or None if their events differ."""

    def line(at_low: int, at_high: int) -> Affine:
        each, left = divmod(at_high - at_low, samples[1] - samples[0])
        if left:
            raise _NotAffineError
        return at_low - each * samples[0], each

    if _mapped(low, lambda _: 0) != _mapped(high, lambda _: 0):
        return None
    pairs = zip(_numbers(low), _numbers(high), strict=True)
    try:
        lines = iter([line(*both) for both in pairs])
    except _NotAffineError:
        return None
    return _mapped(low, lambda _: next(lines))


def scaled(low: RawLog[int], high: RawLog[int], samples: tuple[int, int]) -> AffineLog:
    """Return a log with the events of the smaller run, whose sums are those of both runs.

    It is for models that loop over samples, images or experts: how often each operator runs depends on the
    micro-batch size. What an operator of a module allocates in all grows from one run to the other, and each
    of its storages by its share.
    """
    first, second = _by_place(low), _by_place(high)
    places = [_place(low, storage) for storage in range(len(low.num_bytes))]
    sums = [(first[place], second[place]) for place in places]
    before, behind = _by_operator(low), _by_operator(high)
    for call in low.calls:
        sums += zip(before[_operator(low, call)], behind[_operator(low, call)], strict=True)
    lines = iter([_share(size, both, samples) for size, both in zip(_numbers(low), sums, strict=True)])
    return _mapped(low, lambda _: next(lines))


def _share(size: int, sums: tuple[int, int], samples: tuple[int, int]) -> Affine:
    """Return one of several sizes as a line, if their sum is known for two numbers of samples."""
    grows = (sums[1] - sums[0]) * size / sums[0] if sums[0] else 0.0
    each = round(grows / (samples[1] - samples[0]))
    return size - each * samples[0], each


def _place(log: RawLog[Any], storage: int) -> tuple[Any, ...]:
    return log.kinds[storage], log.modules[storage], log.operator_names[log.operators[storage]]


def _by_place(log: RawLog[int]) -> Counter[tuple[Any, ...]]:
    totals: Counter[tuple[Any, ...]] = Counter()
    for number, size in enumerate(log.num_bytes):
        totals[_place(log, number)] += size
    return totals


def _operator(log: RawLog[Any], call: OperatorCall[Any]) -> tuple[Any, ...]:
    return log.operator_names[call.operator], call.kind, call.during, call.precision


def _by_operator(log: RawLog[int]) -> defaultdict[tuple[Any, ...], tuple[int, int]]:
    totals: defaultdict[tuple[Any, ...], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for call in log.calls:
        flops, moved = totals[_operator(log, call)]
        totals[_operator(log, call)] = flops + call.flops, moved + call.num_bytes
    return totals


def peak_bytes(log: AffineLog, samples: int) -> int:
    """Return the most bytes that a log holds at once at a size."""
    now = most = 0
    for code, argument in zip(log.codes, log.arguments, strict=True):
        if code in (Event.ALLOCATE, Event.FREE):
            fixed, each = log.num_bytes[argument]
            now += (fixed + each * samples) * (1 if code == Event.ALLOCATE else -1)
            most = max(most, now)
    return most


def exact(log: RawLog[int]) -> AffineLog:
    """Return the log for the size of a single run."""
    return _mapped(log, lambda size: (size, 0))


def difference(log: AffineLog, raw: RawLog[int], samples: int) -> str | None:
    """Return where a log at a size differs from a run at that size, or None."""
    mine = _mapped(log, lambda size: size[0] + size[1] * samples)
    for field in fields(RawLog):
        here, there = (_named(side, field.name) for side in (mine, raw))
        if here != there:
            if len(here) != len(there):
                return f"{len(here)} {field.name}, not {len(there)}"
            at = next(place for place, both in enumerate(zip(here, there, strict=True)) if both[0] != both[1])
            return f"{field.name} at {at}: {here[at]}, not {there[at]}"
    return None


def _named(log: RawLog[int], column: str) -> list[Any]:
    """Return a column of a log with operators by name, since runs number them by first call."""
    names = log.operator_names
    if column == "operators":
        return [names[operator] for operator in log.operators]
    if column == "calls":
        calls = [
            log.calls[argument]
            for code, argument in zip(log.codes, log.arguments, strict=True)
            if code == CALL
        ]
        return [(names[call.operator], replace(call, operator=0)) for call in calls]
    if column == "arguments":
        pairs = zip(log.codes, log.arguments, strict=True)
        return [0 if code == CALL else argument for code, argument in pairs]
    if column == "operator_names":
        return []
    found = getattr(log, column)
    return [*(sorted(found.items()) if isinstance(found, dict) else found)]


def _numbers(log: RawLog[int]) -> list[int]:
    return [*log.num_bytes, *(number for call in log.calls for number in (call.flops, call.num_bytes))]


def _mapped(log: RawLog[Any], change: Callable[[Any], Any]) -> RawLog[Any]:
    """Return a log with each size-dependent number changed, in the order of _numbers()."""
    num_bytes = [change(size) for size in log.num_bytes]
    calls = [replace(call, flops=change(call.flops), num_bytes=change(call.num_bytes)) for call in log.calls]
    return replace(log, num_bytes=num_bytes, calls=calls)


class _NotAffineError(Exception):
    pass


def to_allocation_log(log: AffineLog, skeleton: Skeleton, least: int) -> AllocationLog:
    """Return the log in the form that estimates use.

    Args:
        least: the smallest micro-batch size that it holds for.
    """
    pairs = [*zip(log.codes, log.arguments, strict=True)]
    events = [pair for pair in pairs if pair[0] != CALL]
    of_last = [code for code, _ in pairs[:-1]]
    start = len(of_last) - of_last[::-1].index(Event.BACKWARD_ENDS) if Event.BACKWARD_ENDS in of_last else 0
    counts = Counter(log.calls[argument] for code, argument in pairs[start:] if code == CALL)
    return AllocationLog(
        least_micro_batch_size=least,
        modules=skeleton.modules,
        module_parameters=skeleton.module_parameters,
        parameters=skeleton.parameters,
        buffer_bytes=skeleton.buffer_bytes,
        storages=Storages(
            kinds=tuple(log.kinds),
            fixed_bytes=tuple(fixed for fixed, _ in log.num_bytes),
            bytes_per_sample=tuple(each for _, each in log.num_bytes),
            modules=tuple(log.modules),
            operators=tuple(log.operators),
            streams=tuple(log.streams) if any(log.streams) else (),
        ),
        operators=tuple(log.operator_names),
        codes=bytes(code for code, _ in events),
        arguments=tuple(argument for _, argument in events),
        gradient_storages=tuple(
            log.gradient_storages.get(number, -1) for number in range(len(skeleton.parameters))
        ),
        costs=tuple(
            OperatorCost(
                operator=log.operator_names[call.operator],
                kind=call.kind,
                during=call.during,
                precision=call.precision,
                count=count,
                fixed_flops=call.flops[0],
                flops_per_sample=call.flops[1],
                fixed_bytes=call.num_bytes[0],
                bytes_per_sample=call.num_bytes[1],
            )
            for call, count in counts.items()
        ),
    )
