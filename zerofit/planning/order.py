"""The order of preference among strategies: what changes least, then time, then simplicity."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.core.freezing import FROZEN_LAYERS
from zerofit.core.strategy import Buckets, Engine, OffloadDevice, OptimizerName, ZeroStage

if TYPE_CHECKING:
    from collections.abc import Collection

    from zerofit.core.strategy import Strategy

SAME_TIME = 0.1
"""Estimated times that differ by no more than this share are not told apart: 20 published steps
took 12 % more or less than estimated in the median (zerofit/planning/estimate/time/step_time.py), so that a lead of a tenth may
be none."""
OFFLOADED = 1
"""The tier of what rests outside the GPU: its times hang on the host's memory, links and cores, and are the
least certain, so that it comes where nothing that stays on the GPUs fits."""
Kind = tuple[Engine, ZeroStage, OffloadDevice, OffloadDevice]
"""Engine, stage, optimizer offload and parameter offload."""

_OFFLOAD = {OffloadDevice.NONE: 0, OffloadDevice.CPU: 1, OffloadDevice.NVME: 2}
_OPTIMIZER = {
    None: 0,
    OptimizerName.ADAMW: 1,
    OptimizerName.PAGED_ADAMW: 2,
    OptimizerName.ADAMW_8BIT: 3,
    OptimizerName.PAGED_ADAMW_8BIT: 4,
    OptimizerName.ADAFACTOR: 5,
    OptimizerName.LION: 6,
    OptimizerName.LION_8BIT: 7,
    OptimizerName.PAGED_LION_8BIT: 8,
    OptimizerName.SGD: 9,
}


def kind_of(strategy: Strategy) -> Kind:
    """Return what decides where model states lie."""
    return strategy.engine, strategy.zero_stage, strategy.optimizer_offload, strategy.param_offload


def tier(strategy: Strategy, *, fixed: Collection[str] = ()) -> int:
    """Return how far a strategy goes; a lower one always comes first.

    0: all stays on the GPUs. OFFLOADED: something does not; the mathematics stays. 2: optimizer states in
    8 bit. 3: another optimizer. 4: frozen embeddings. 5: frozen layers. 6: adapters.

    Args:
        strategy: what would run.
        fixed: names of the fields that the user chose, which are no change then.
    """
    if strategy.lora is not None and "lora" not in fixed:
        return 6
    if strategy.freeze and "freeze" not in fixed:
        return 5 if strategy.freeze == FROZEN_LAYERS else 4
    if "optimizer" in fixed or strategy.optimizer in (None, OptimizerName.ADAMW, OptimizerName.PAGED_ADAMW):
        return OFFLOADED if strategy.offloads else 0
    return 2 if strategy.optimizer in (OptimizerName.ADAMW_8BIT, OptimizerName.PAGED_ADAMW_8BIT) else 3


def simplicity(strategy: Strategy) -> tuple[int, ...]:
    """Return how much machinery a strategy takes: the smaller, the simpler.

    What rests off the GPU first, then DeepSpeed and its stage; within one kind recomputation, small buckets,
    another optimizer, and last a smaller micro-batch.
    """
    return (
        _OFFLOAD[strategy.optimizer_offload] + _OFFLOAD[strategy.param_offload],
        strategy.engine is not Engine.NATIVE,
        strategy.zero_stage.value,
        bool(strategy.gradient_checkpointing),
        strategy.buckets != Buckets(),
        _OPTIMIZER[strategy.optimizer],
        -(strategy.micro_batch_size or 0),
    )
