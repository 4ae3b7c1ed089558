"""Whether FSDP2 is worth traces of its own beside the other engines, and what is known of it without any."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from zerofit.core.strategy import Engine, ZeroStage
from zerofit.planning.plan_reasons import tier_in
from zerofit.planning.search import OFFLOAD_TIER, Untraced, placement_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerofit.core.strategy import Strategy
    from zerofit.planning.problem import Problem
    from zerofit.planning.search import TrainingResult
    from zerofit.planning.training_estimator import TrainingEstimator

NEAR = 1.1
"""By how much ZeRO-3 may exceed the memory for FSDP2 to be worth a trace. ASSUMPTION: both hold the same
states and activations, and buffers that differ by less."""


def may_be_better(
    problem: Problem,
    sharded: Sequence[Strategy],
    others: Sequence[Strategy],
    found: TrainingResult,
    estimator: TrainingEstimator,
) -> list[Strategy]:
    """Return the strategies of FSDP2 that may fit in a lower tier than the choice among the others.

    Args:
        sharded: those of FSDP2.
        others: the other candidates.
        found: the result for these.
    """
    tier_of = partial(tier_in, problem)
    best = math.inf if found.chosen is None else tier_of(found.chosen.strategy)
    if best < OFFLOAD_TIER:
        return []
    kinds = {_kind(strategy) for strategy in others}
    judged = [*found.others, *((found.nearest,) if found.nearest is not None else ())]
    near = {placement_of(other.strategy) for other in judged if other.excess <= NEAR}

    def is_near(strategy: Strategy) -> bool:
        """Return True if ZeRO-3 in its place nearly fits, or can't train this at all."""
        _, _, *offload = placement_of(strategy)
        as_zero = (Engine.DEEPSPEED, ZeroStage.PARAMETERS, *offload)
        return as_zero in near or (as_zero, *_kind(strategy)[1:]) not in kinds

    return [
        strategy
        for strategy in sharded
        if tier_of(strategy) < best
        and is_near(strategy)
        and estimator.least_bytes(strategy) <= problem.device_bytes
        and estimator.least_live_bytes(strategy) <= problem.device_bytes
    ]


def _kind(strategy: Strategy) -> tuple[object, ...]:
    return placement_of(strategy), strategy.lora, strategy.quantization, strategy.freeze


def best_untraced(
    problem: Problem, sharded: Sequence[Strategy], estimator: TrainingEstimator
) -> Untraced | None:
    """Return the best strategy of FSDP2 as far as it is known without a trace of it."""
    on_gpus = [strategy for strategy in sharded if not strategy.offloads and strategy.reshard_after_forward]
    known = [
        Untraced(strategy=strategy, least_bytes=least, seconds=estimator.seconds(strategy))
        for strategy in on_gpus
        if estimator.least_bytes(strategy) <= problem.device_bytes
        and (least := estimator.least_live_bytes(strategy)) <= problem.device_bytes
    ]
    if known:
        return min(known, key=lambda best: (tier_in(problem, best.strategy), best.seconds or 0.0))
    smallest = min(on_gpus, key=estimator.least_bytes, default=None)
    if smallest is None:
        return None
    return Untraced(strategy=smallest, least_bytes=estimator.least_bytes(smallest), seconds=None)
