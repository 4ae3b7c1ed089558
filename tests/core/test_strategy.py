"""A strategy's words about offload."""

from __future__ import annotations

from typing import Any

import pytest

from zerofit.core.plan import Topology
from zerofit.core.strategy import (
    Engine,
    Lora,
    OffloadDevice,
    Precision,
    Strategy,
    ZeroStage,
    describe_strategy,
)

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


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "FSDP2"),
        ({"reshard_after_forward": False}, "FSDP2 without resharding"),
        ({"precision": Precision.BF16, "compile": True}, "FSDP2, bf16, compiled"),
        ({"optimizer_offload": _CPU, "param_offload": _CPU}, "FSDP2, optimizer on cpu, parameters on cpu"),
    ],
)
def test_fsdp2_in_a_few_words(fields: dict[str, Any], words: str) -> None:
    assert describe_strategy(Strategy(engine=Engine.FSDP2, **fields)) == words


@pytest.mark.parametrize(
    ("world_size", "copies", "shards"), [(8, 1, 8), (8, 2, 4), (8, 8, 1), (6, 3, 2), (1, 1, 1)]
)
def test_hybrid_sharding_cuts_each_copy_over_the_ranks_that_share_it(
    world_size: int, copies: int, shards: int
) -> None:
    assert Topology(world_size=world_size, dp_replicate_size=copies).dp_shard_size == shards


def test_copies_must_divide_the_ranks() -> None:
    with pytest.raises(ValueError, match="dp_replicate_size: 8 ranks do not divide into 3 copies"):
        Topology(world_size=8, dp_replicate_size=3)


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
