"""The order in which strategies are preferred: what keeps the mathematics, then time, then simplicity."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from zerofit.strategy import Buckets, Engine, OffloadDevice, OptimizerName, ZeroStage

if TYPE_CHECKING:
    from zerofit.strategy import Strategy

TIME_GRAIN = 0.01
"""ASSUMPTION: estimated times that differ by less are alike, and the simpler strategy is taken."""
Kind = tuple[Engine, ZeroStage, OffloadDevice, OffloadDevice]
"""Engine, stage, optimizer offload and parameter offload."""

_OFFLOAD = {OffloadDevice.NONE: 0, OffloadDevice.CPU: 1, OffloadDevice.NVME: 2}
_OPTIMIZER = {
    None: 0,
    OptimizerName.ADAMW: 1,
    OptimizerName.ADAMW_8BIT: 2,
    OptimizerName.ADAFACTOR: 3,
    OptimizerName.SGD: 4,
}


def kind_of(strategy: Strategy) -> Kind:
    """Return what decides where model states lie."""
    return strategy.engine, strategy.zero_stage, strategy.optimizer_offload, strategy.param_offload


def tier(strategy: Strategy, *, fixes_optimizer: bool = False) -> int:
    """Return how much of the mathematics a strategy changes; a lower one always comes first.

    0: none. 1: optimizer states in 8 bit. 2: another optimizer. 3: frozen weights. 4: adapters.

    Args:
        strategy: what would run.
        fixes_optimizer: whether the user chose the optimizer, so that it is no change.
    """
    if strategy.lora is not None:
        return 4
    if strategy.freeze:
        return 3
    if fixes_optimizer or strategy.optimizer in (None, OptimizerName.ADAMW):
        return 0
    return 1 if strategy.optimizer is OptimizerName.ADAMW_8BIT else 2


def preference(
    strategy: Strategy, seconds: float | None, *, fixes_optimizer: bool = False
) -> tuple[float, ...]:
    """Return the strategy's place: the smaller, the better.

    Args:
        strategy: what would run.
        seconds: time per sample or per step, the same for all that are compared; None where it is not known,
            and the simplest comes first.
        fixes_optimizer: as in tier.
    """
    return (
        tier(strategy, fixes_optimizer=fixes_optimizer),
        0 if seconds is None else math.floor(math.log(max(seconds, 1e-9)) / math.log1p(TIME_GRAIN)),
        _OFFLOAD[strategy.optimizer_offload] + _OFFLOAD[strategy.param_offload],
        bool(strategy.gradient_checkpointing),
        strategy.zero_stage.value,
        strategy.engine is not Engine.NATIVE,
        strategy.buckets != Buckets(),
        _OPTIMIZER[strategy.optimizer],
        -(strategy.micro_batch_size or 0),
    )
