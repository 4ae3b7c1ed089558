"""make_engine: the engine that a setup's strategy names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.estimate.native import NativeEngine
from zerofit.estimate.zero_stage0 import DeepSpeedStage0
from zerofit.estimate.zero_stage3 import DeepSpeedStage3
from zerofit.estimate.zero_stage12 import DeepSpeedStage12
from zerofit.strategy import Engine as EngineName
from zerofit.strategy import ZeroStage

if TYPE_CHECKING:
    from zerofit.estimate.engine import Engine, Setup
    from zerofit.estimate.tape import Tape

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
