"""A strategy's words about offload."""

from __future__ import annotations

import pytest

from zerofit.core.strategy import Engine, Lora, OffloadDevice, Strategy, ZeroStage

_NONE, _CPU, _NVME = OffloadDevice.NONE, OffloadDevice.CPU, OffloadDevice.NVME


@pytest.mark.parametrize(
    ("optimizer", "param", "offloads", "uses_nvme"),
    [
        (_NONE, _NONE, False, False),
        (_CPU, _NONE, True, False),
        (_NONE, _CPU, True, False),
        (_CPU, _CPU, True, False),
        (_NVME, _NONE, True, True),
        (_NONE, _NVME, True, True),
        (_CPU, _NVME, True, True),
    ],
)
def test_offload(optimizer: OffloadDevice, param: OffloadDevice, offloads: bool, uses_nvme: bool) -> None:
    strategy = Strategy(optimizer_offload=optimizer, param_offload=param)
    assert (strategy.offloads, strategy.uses_nvme) == (offloads, uses_nvme)


def test_the_empty_strategy_changes_nothing_in_the_script() -> None:
    strategy = Strategy()
    assert (strategy.engine, strategy.zero_stage, strategy.offloads) == (
        Engine.NATIVE,
        ZeroStage.NOTHING,
        False,
    )
    left_to_the_script = (
        strategy.precision,
        strategy.micro_batch_size,
        strategy.gradient_accumulation_steps,
        strategy.gradient_clipping,
        strategy.gradient_checkpointing,
        strategy.optimizer,
        strategy.lora,
    )
    assert left_to_the_script == (None,) * 7


def test_each_stage_partitions_more() -> None:
    assert list(ZeroStage) == sorted(ZeroStage)
    assert [stage.value for stage in ZeroStage] == [0, 1, 2, 3]


@pytest.mark.parametrize(("gradient_clipping", "clips"), [(None, True), (0.0, False), (1.0, True)])
def test_gradients_are_clipped_unless_that_is_switched_off(
    gradient_clipping: float | None, clips: bool
) -> None:
    assert Strategy(gradient_clipping=gradient_clipping).clips_gradients is clips


@pytest.mark.parametrize(("field", "number"), [("rank", 0), ("alpha", 0), ("dropout", -0.1)])
def test_adapters_without_a_rank_are_refused(field: str, number: float) -> None:
    with pytest.raises(ValueError, match=f"^{field}: {number} is not a number of at least"):
        Lora(**{field: number})  # type: ignore[arg-type]
