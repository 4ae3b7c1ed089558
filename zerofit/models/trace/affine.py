"""AffineLog: a log as a function of the micro-batch size, fitted to runs at two sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.core.allocation_log import AllocationLog, OperatorCost, Storages
from zerofit.models.trace.raw import CALL

if TYPE_CHECKING:
    from zerofit.core.allocation_log import CostKind, Pass, TensorKind
    from zerofit.core.strategy import Precision
    from zerofit.models.trace.raw import Call, RawLog, Skeleton

Affine = tuple[int, int]
"""What is there without samples, and what each sample adds."""


@dataclass(frozen=True, slots=True)
class AffineCall:
    """The work of one call of an operator."""

    operator: int
    kind: CostKind
    during: Pass
    precision: Precision
    flops: Affine
    num_bytes: Affine


@dataclass(slots=True, kw_only=True)
class AffineLog:
    """A RawLog with two numbers for each one that depends on the micro-batch size."""

    kinds: list[TensorKind]
    num_bytes: list[Affine]
    modules: list[int]
    operators: list[int]
    codes: list[int]
    arguments: list[int]
    calls: list[AffineCall]
    gradient_storages: dict[int, int]
    operator_names: list[str]


def fit(low: RawLog, high: RawLog, samples: tuple[int, int]) -> AffineLog | None:
    """Return the log that is right at two sizes, or None where they do not the same in the same order."""
    if _shape(low) != _shape(high):
        return None

    def line(at_low: int, at_high: int) -> Affine:
        each, left = divmod(at_high - at_low, samples[1] - samples[0])
        if left:
            raise _NotAffineError
        return at_low - each * samples[0], each

    try:
        return AffineLog(
            kinds=low.kinds,
            num_bytes=[line(*both) for both in zip(low.num_bytes, high.num_bytes, strict=True)],
            modules=low.modules,
            operators=low.operators,
            codes=low.codes,
            arguments=low.arguments,
            calls=[
                AffineCall(
                    one.operator,
                    one.kind,
                    one.during,
                    one.precision,
                    line(one.flops, other.flops),
                    line(one.num_bytes, other.num_bytes),
                )
                for one, other in zip(low.calls, high.calls, strict=True)
            ],
            gradient_storages=low.gradient_storages,
            operator_names=low.operator_names,
        )
    except _NotAffineError:
        return None


def exact(log: RawLog) -> AffineLog:
    """Return the log that holds for the size of one run alone."""
    return AffineLog(
        kinds=log.kinds,
        num_bytes=[(size, 0) for size in log.num_bytes],
        modules=log.modules,
        operators=log.operators,
        codes=log.codes,
        arguments=log.arguments,
        calls=[
            AffineCall(
                call.operator, call.kind, call.during, call.precision, (call.flops, 0), (call.num_bytes, 0)
            )
            for call in log.calls
        ],
        gradient_storages=log.gradient_storages,
        operator_names=log.operator_names,
    )


def difference(log: AffineLog, raw: RawLog, samples: int) -> str | None:
    """Return the first thing in which a log at a size differs from a run at that size, or None."""
    if len(log.codes) != len(raw.codes) or len(log.kinds) != len(raw.kinds):
        return (
            f"{len(log.codes)} events and {len(log.kinds)} storages, not {len(raw.codes)}, {len(raw.kinds)}"
        )
    for place, (code, mine, others) in enumerate(zip(log.codes, log.arguments, raw.arguments, strict=True)):
        if code != raw.codes[place]:
            return f"event {place} is {code}, not {raw.codes[place]}"
        if code == CALL:
            if not _same_call(log.calls[mine], log, raw.calls[others], raw, samples):
                return f"call at {place}: {log.calls[mine]}, not {raw.calls[others]}"
        elif mine != others:
            return f"event {place}: {code} of {mine}, not of {others}"
    for index, size in enumerate(log.num_bytes):
        here = (log.kinds[index], size[0] + size[1] * samples, log.modules[index])
        there = (raw.kinds[index], raw.num_bytes[index], raw.modules[index])
        name = raw.operator_names[raw.operators[index]]
        if here != there or log.operator_names[log.operators[index]] != name:
            return f"storage {index} of {name}: {here}, not {there}"
    return None if log.gradient_storages == raw.gradient_storages else "other gradients"


def _same_call(mine: AffineCall, log: AffineLog, call: Call, raw: RawLog, samples: int) -> bool:
    return (
        mine.flops[0] + mine.flops[1] * samples == call.flops
        and mine.num_bytes[0] + mine.num_bytes[1] * samples == call.num_bytes
        and (mine.kind, mine.during, mine.precision) == (call.kind, call.during, call.precision)
        and log.operator_names[mine.operator] == raw.operator_names[call.operator]
    )


class _NotAffineError(Exception):
    pass


def _shape(log: RawLog) -> tuple[object, ...]:
    return (
        log.codes,
        log.arguments,
        log.kinds,
        log.modules,
        log.operators,
        log.operator_names,
        log.gradient_storages,
        [(call.operator, call.kind, call.during, call.precision) for call in log.calls],
    )


def to_allocation_log(log: AffineLog, skeleton: Skeleton, least: int) -> AllocationLog:
    """Return the log in the form that estimates take.

    Args:
        log: of the whole model.
        skeleton: its modules and parameters.
        least: the smallest micro-batch that it holds for.
    """
    events = [
        (code, argument) for code, argument in zip(log.codes, log.arguments, strict=True) if code != CALL
    ]
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
        ),
        operators=tuple(log.operator_names),
        codes=bytes(code for code, _ in events),
        arguments=tuple(argument for _, argument in events),
        gradient_storages=tuple(
            log.gradient_storages.get(number, -1) for number in range(len(skeleton.parameters))
        ),
        costs=_costs(log),
    )


def _costs(log: AffineLog) -> tuple[OperatorCost, ...]:
    """Return alike calls once, with their count, in the order of their first."""
    counts: dict[AffineCall, int] = {}
    for code, argument in zip(log.codes, log.arguments, strict=True):
        if code == CALL:
            counts[log.calls[argument]] = counts.get(log.calls[argument], 0) + 1
    return tuple(
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
    )
