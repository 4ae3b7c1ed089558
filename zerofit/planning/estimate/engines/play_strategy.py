"""play_strategy: a setup played on a tape by the engine that its strategy names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.core.strategy import Engine, ZeroStage
from zerofit.planning.estimate.device_memory.replay import Tape
from zerofit.planning.estimate.engines.engine import play
from zerofit.planning.estimate.engines.native import NativeEngine
from zerofit.planning.estimate.engines.zero_stage3 import DeepSpeedStage3
from zerofit.planning.estimate.engines.zero_stages_0_to_2 import DeepSpeedStage0, DeepSpeedStage12

if TYPE_CHECKING:
    from zerofit.planning.estimate.engines.engine import Setup, SimulatedEngine

_STAGES: dict[ZeroStage, type[SimulatedEngine]] = {
    ZeroStage.NOTHING: DeepSpeedStage0,
    ZeroStage.OPTIMIZER_STATES: DeepSpeedStage12,
    ZeroStage.GRADIENTS: DeepSpeedStage12,
    ZeroStage.PARAMETERS: DeepSpeedStage3,
}


def play_strategy(setup: Setup, *, sketch: bool = False) -> SimulatedEngine:
    """Play a run and return the engine with its tape; a sketch is quicker and less exact (see play)."""
    strategy = setup.strategy
    kind = NativeEngine if strategy.engine is Engine.NATIVE else _STAGES[strategy.zero_stage]
    engine = kind(setup, Tape())
    play(engine, sketch=sketch)
    return engine
