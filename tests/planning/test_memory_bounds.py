"""Lower bounds of memory: the envelope of lines, and the model states on each GPU."""

from __future__ import annotations

import random

import pytest
from planning_problems import model

from zerofit.core.plan import Topology
from zerofit.core.strategy import Engine, Lora, OffloadDevice, OptimizerName, Precision, Strategy, ZeroStage
from zerofit.planning.memory_bounds import envelope, least_gradient_bytes, least_state_bytes


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("start", [0, 1])
def test_the_envelope_is_as_high_as_all_lines_together(seed: int, start: int) -> None:
    dice = random.Random(seed)
    lines = {(dice.randint(-50, 50), dice.randint(0, 20)) for _ in range(30)}
    kept = envelope(lines, start=start)
    assert set(kept) <= lines
    for place in range(start, start + 100):
        assert max(a + b * place for a, b in kept) == max(a + b * place for a, b in lines)


def _zero(stage: ZeroStage, **fields: object) -> Strategy:
    return Strategy(engine=Engine.DEEPSPEED, zero_stage=stage, precision=Precision.BF16, **fields)  # type: ignore[arg-type]


_STAGES = tuple(ZeroStage)


@pytest.mark.parametrize(
    ("strategy", "per_parameter"),
    [
        (Strategy(precision=Precision.BF16), 4 + 8 + 4),
        (Strategy(precision=Precision.BF16, optimizer=OptimizerName.ADAMW_8BIT), 4 + 2 + 4),
        *(
            (Strategy(precision=Precision.BF16, optimizer=name), 4 + least + 4)
            for name, least in (
                (OptimizerName.LION, 4),
                (OptimizerName.LION_8BIT, 1),
                # Sums over rows and columns, no momentum, pages that may leave the GPU: nothing is certain.
                (OptimizerName.ADAFACTOR, 0),
                (OptimizerName.SGD, 0),
                (OptimizerName.PAGED_ADAMW, 0),
                (OptimizerName.PAGED_ADAMW_8BIT, 0),
                (OptimizerName.PAGED_LION_8BIT, 0),
            )
        ),
        (Strategy(precision=Precision.BF16, lora=Lora()), 2),
        (_zero(_STAGES[0]), 2 + 12),
        (_zero(_STAGES[1]), 2 + 12 / 4),
        (_zero(_STAGES[2]), 2 + 12 / 4),
        (_zero(_STAGES[3]), 14 / 4),
        (_zero(_STAGES[2], optimizer=OptimizerName.ADAMW_8BIT), 2 + 6 / 4),
        (_zero(_STAGES[2], optimizer_offload=OffloadDevice.CPU), 2),
        (_zero(_STAGES[3], optimizer_offload=OffloadDevice.CPU), 2 / 4),
        (
            _zero(_STAGES[3], optimizer_offload=OffloadDevice.CPU, param_offload=OffloadDevice.CPU),
            0,
        ),
    ],
)
def test_states_on_four_gpus(strategy: Strategy, per_parameter: float) -> None:
    facts = model(num_parameters=4000, num_trainable_parameters=4000)
    assert least_state_bytes(strategy, facts, Topology(world_size=4)) == 4000 * per_parameter


@pytest.mark.parametrize(
    ("strategy", "per_parameter"),
    [
        (Strategy(precision=Precision.BF16), 4),
        (_zero(_STAGES[1]), 2),
        (_zero(_STAGES[2]), 0),
        (_zero(_STAGES[1], optimizer_offload=OffloadDevice.CPU), 0),
        (Strategy(lora=Lora()), 0),
    ],
)
def test_gradients(strategy: Strategy, per_parameter: int) -> None:
    assert (
        least_gradient_bytes(strategy, model(num_trainable_parameters=1000), Topology())
        == 1000 * per_parameter
    )
