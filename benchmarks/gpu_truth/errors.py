"""Relative errors of predictions, case by case, and their statistics by group."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from zerofit.core.strategy import Engine, OptimizerName, Precision

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from measuring.results import TrialMeasurement, TrialPrediction

    from gpu_truth.results import Case, CaseResult

LIMIT = 0.05
"""Of what was measured: an error of memory above it has to be explained, or mended in the estimator."""
ALL = "all"
"""Stands for all groups together."""
_OWN_OPTIMIZER = "adamw foreach"
"""The training loop's default (benchmarks/measuring/training_loop.py)."""


class Quantity(StrEnum):
    """What is both measured and predicted."""

    ALLOCATED = "allocated"
    RESERVED = "reserved"
    DEVICE = "device"
    WEIGHTS = "weights"
    """This and those below are counted tensors: on the CPU, where there is no allocator of CUDA."""
    GRADIENTS = "gradients"
    OPTIMIZER_STATES = "optimizer states"
    ACTIVATIONS = "activations"
    STEP_TIME = "step time"
    """In seconds; the others are bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseError:
    """One quantity of one case."""

    key: str
    group: str
    traits: tuple[str, ...]
    """What its strategy makes of the training, as traits_of() words it."""
    quantity: Quantity
    predicted: float
    """Bytes, or seconds."""
    measured: float
    """As predicted; above zero."""
    calibrates: bool

    @property
    def error(self) -> float:
        """Relative: above zero where too much was predicted."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Errors of one quantity in one group, without their signs."""

    group: str
    """That of the cases, or one of their traits."""
    quantity: Quantity
    num_cases: int
    median: float
    percentile_90: float
    """The smallest error that nine of ten cases do not exceed."""
    worst: float
    worst_key: str


def case_errors(results: Iterable[CaseResult]) -> tuple[CaseError, ...]:
    """Return the error of each quantity that a case has both measured, above zero, and predicted."""
    return tuple(
        CaseError(
            key=one.case.key,
            group=one.case.group,
            traits=traits_of(one.case),
            quantity=quantity,
            predicted=predicted,
            measured=measured,
            calibrates=one.case.calibrates,
        )
        for one in results
        if one.outcome.measured is not None and one.predicted is not None
        for quantity, measured, predicted in _pairs(one.outcome.measured, one.predicted)
        if measured and predicted is not None
    )


def traits_of(case: Case) -> tuple[str, ...]:
    """Return a short description of a case's strategy, which groups cases that share it."""
    strategy = case.strategy
    precision = strategy.precision or Precision.FP32
    number_format = precision.value if precision is case.weights else f"autocast {precision}"
    optimizer = strategy.optimizer.value if strategy.optimizer else _OWN_OPTIMIZER
    if strategy.optimizer is OptimizerName.ADAMW:
        optimizer = "adamw fused"
    said = {
        f"format: {number_format}": True,
        f"optimizer: {optimizer}": strategy.engine is Engine.NATIVE,
        "checkpointing": strategy.gradient_checkpointing,
        "accumulation": (strategy.gradient_accumulation_steps or 1) > 1,
        "LoRA": strategy.lora is not None,
        "freezing": strategy.freeze,
        "offload": strategy.offloads,
    }
    return tuple(words for words, is_said in said.items() if is_said)


def summaries(errors: Sequence[CaseError]) -> tuple[Summary, ...]:
    """Return the statistics of each quantity by group, then of all, without cases that calibrate."""
    counted = _counted(errors)
    groups = sorted({one.group for one in counted})
    members = {group: [one for one in counted if one.group == group] for group in groups}
    return _summaries({**members, ALL: counted})


def summaries_by_trait(errors: Sequence[CaseError]) -> tuple[Summary, ...]:
    """Return the same by what the strategies make of the training; a case is in as many as it has traits."""
    counted = _counted(errors)
    traits = sorted({trait for one in counted for trait in one.traits})
    return _summaries({trait: [one for one in counted if trait in one.traits] for trait in traits})


def above_limit(errors: Iterable[CaseError]) -> tuple[CaseError, ...]:
    """Return the errors of memory above LIMIT, the largest first, those of calibrating cases too."""
    large = [one for one in errors if one.quantity is not Quantity.STEP_TIME and abs(one.error) > LIMIT]
    return tuple(sorted(large, key=lambda one: -abs(one.error)))


def _counted(errors: Sequence[CaseError]) -> list[CaseError]:
    return [one for one in errors if not one.calibrates]


def _summaries(groups: dict[str, list[CaseError]]) -> tuple[Summary, ...]:
    found = []
    for quantity in Quantity:
        for group, errors in groups.items():
            members = [one for one in errors if one.quantity is quantity]
            if members:
                found.append(_summary(group, quantity, members))
    return tuple(found)


def _pairs(
    measured: TrialMeasurement, predicted: TrialPrediction
) -> list[tuple[Quantity, float | None, float | None]]:
    times = (Quantity.STEP_TIME, measured.step_time_s, predicted.step_time_s)
    if measured.allocated_bytes is not None:
        return [
            (Quantity.ALLOCATED, measured.allocated_bytes, predicted.allocated_bytes),
            (Quantity.RESERVED, measured.reserved_bytes, predicted.reserved_bytes),
            (Quantity.DEVICE, measured.device_bytes, predicted.device_bytes),
            times,
        ]
    counted, parts = measured.counted, predicted.parts
    if counted is None or parts is None:
        return [times]
    return [
        (Quantity.WEIGHTS, counted.weights, parts.weights),
        (Quantity.GRADIENTS, counted.gradients, parts.gradients),
        (Quantity.OPTIMIZER_STATES, counted.optimizer_states, parts.optimizer_states),
        (Quantity.ACTIVATIONS, counted.activations, parts.activations),
        times,
    ]


def _summary(group: str, quantity: Quantity, members: Sequence[CaseError]) -> Summary:
    ordered = sorted(members, key=lambda one: abs(one.error))
    sizes = [abs(one.error) for one in ordered]
    return Summary(
        group=group,
        quantity=quantity,
        num_cases=len(ordered),
        median=statistics.median(sizes),
        percentile_90=sizes[math.ceil(0.9 * len(sizes)) - 1],
        worst=sizes[-1],
        worst_key=ordered[-1].key,
    )
