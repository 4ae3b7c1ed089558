"""make_engine: the engine that a setup's strategy names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.core.strategy import Engine as EngineName
from zerofit.core.strategy import ZeroStage
from zerofit.planning.estimate.engines.native import NativeEngine
from zerofit.planning.estimate.engines.zero_stage0 import DeepSpeedStage0
from zerofit.planning.estimate.engines.zero_stage3 import DeepSpeedStage3
from zerofit.planning.estimate.engines.zero_stage12 import DeepSpeedStage12

if TYPE_CHECKING:
    from zerofit.planning.estimate.device_memory.tape import Tape
    from zerofit.planning.estimate.engines.engine import Engine, Setup

_STAGES: dict[ZeroStage, type[Engine]] = {
    ZeroStage.NOTHING: DeepSpeedStage0,
    ZeroStage.OPTIMIZER_STATES: DeepSpeedStage12,
    ZeroStage.GRADIENTS: DeepSpeedStage12,
    ZeroStage.PARAMETERS: DeepSpeedStage3,
}


def make_engine(setup: Setup, tape: Tape) -> Engine:
    """Return the engine that plays a setup on a tape."""
    strategy = setup.strategy
    made = NativeEngine if strategy.engine is EngineName.NATIVE else _STAGES[strategy.zero_stage]
    return made(setup, tape)
