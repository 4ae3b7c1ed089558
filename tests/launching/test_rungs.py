"""Rungs by their names, what they change and come to on top of each other, and the launch of each."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from planning_problems import VERSIONS, machine
from refusals import refusal

from zerofit.cli.launch import launch
from zerofit.core.overrides import FLAGS
from zerofit.core.strategy import Lora, OffloadDevice, OptimizerName, Precision, Quantization, ZeroStage
from zerofit.launching.rungs import (
    ON_MANY_RANKS,
    ON_ONE_RANK,
    LadderRun,
    baseline,
    climb,
    launch_flags,
    launch_settings,
    parse_rungs,
    rung_names,
)
from zerofit.planning.plan_from_flags import choose
from zerofit.planning.run_spec import RunSpec
from zerofit.planning.sources.settings import settings_of

if TYPE_CHECKING:
    from zerofit.launching.launch import LaunchedRun

_BASE = baseline(batch_size=32, sequence_length=128, attention="eager")
_NAMES = [name.replace("N", "4") for name in rung_names()]


def _runs(text: str, *, is_cumulative: bool = True) -> list[LadderRun]:
    return [step.run for step in climb(parse_rungs(text), _BASE, is_cumulative=is_cumulative)]


def _changes(text: str) -> list[tuple[str, dict[str, object]]]:
    """Return each rung's label, and the settings that it changes."""
    before = launch_settings(_BASE)
    found = []
    for step in climb(parse_rungs(text), _BASE, is_cumulative=True):
        settings = launch_settings(step.run)
        changed = {name: value for name, value in settings.items() if before.get(name) != value}
        found.append((step.label, changed))
        before = settings
    return found


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("accumulation", "gradient_accumulation_steps", 32),
        ("micro-batch-8", "gradient_accumulation_steps", 4),
        ("checkpointing", "gradient_checkpointing", True),
        ("checkpointing-offload", "activation_offload", True),
        ("checkpointing-offload", "gradient_checkpointing", True),
        ("checkpoint-every-3", "checkpoint_every", 3),
        ("adafactor", "optimizer", OptimizerName.ADAFACTOR),
        ("fused-adamw", "optimizer", OptimizerName.ADAMW),
        ("freeze-first-2", "freeze", ("embeddings+2",)),
        ("lora-8", "lora", Lora(rank=8, alpha=16)),
        ("qlora", "quantization", Quantization.NF4),
    ],
)
def test_a_rung_sets_its_field(name: str, field: str, value: object) -> None:
    (run,) = _runs(name)
    assert getattr(run.strategy, field) == value


def test_every_name_makes_a_rung_and_every_optimizer_has_one() -> None:
    runs = _runs(",".join(_NAMES), is_cumulative=False)
    assert {run.strategy.optimizer for run in runs} == {None, *OptimizerName}
    assert [name for name, run in zip(_NAMES, runs, strict=True) if run == _BASE] == ["baseline"]


def test_each_rung_stands_on_those_before_it() -> None:
    assert _changes(ON_ONE_RANK) == [
        ("baseline", {}),
        ("+ accumulation", {"micro_batch_size": 1, "gradient_accumulation_steps": 32}),
        ("+ gradient checkpointing", {"gradient_checkpointing": True}),
        ("+ Adafactor", {"optimizer": OptimizerName.ADAFACTOR}),
        ("+ frozen blocks", {"freeze": ("blocks",)}),
        ("+ length 64", {}),
    ]
    last = _runs(ON_ONE_RANK)[-1]
    assert (last.sequence_length, last.strategy.micro_batch_size) == (64, 1)


def test_on_several_ranks_each_rung_partitions_or_offloads_more() -> None:
    assert _changes(ON_MANY_RANKS)[2:] == [
        ("+ ZeRO-2", {"zero_stage": ZeroStage.GRADIENTS}),
        ("+ ZeRO-3", {"zero_stage": ZeroStage.PARAMETERS}),
        ("+ gradient checkpointing", {"gradient_checkpointing": True}),
        ("+ optimizer on the host", {"optimizer_offload": OffloadDevice.CPU}),
        ("+ parameters on the host", {"param_offload": OffloadDevice.CPU}),
    ]


def test_alone_each_rung_stands_on_the_baseline() -> None:
    bf16, sgd = _runs("bf16,sgd", is_cumulative=False)
    assert sgd.strategy.precision is Precision.FP32
    assert bf16.strategy.optimizer is None


def test_the_order_is_the_users_and_baseline_goes_back_to_the_start() -> None:
    sgd, both, base, short = _runs("sgd, BF16,baseline,length_64")
    assert (sgd.strategy.optimizer, both.strategy.precision) == (OptimizerName.SGD, Precision.BF16)
    assert base == _BASE
    assert short == replace(_BASE, sequence_length=64)
    assert _runs("sgd,bf16")[-1] == _runs("bf16,sgd")[-1]


def test_a_change_that_cannot_run_is_left_out_below() -> None:
    rungs = parse_rungs("tf32,bf16,fp16,sgd")
    fails = {True: "tf32", Precision.FP16: "fp16"}
    steps = climb(
        rungs,
        _BASE,
        is_cumulative=True,
        is_left_out=lambda run: bool({run.strategy.tf32, run.strategy.precision} & fails.keys()),
    )
    assert [(step.run.strategy.tf32, step.run.strategy.precision) for step in steps] == [
        (True, Precision.FP32),
        (None, Precision.BF16),
        (None, Precision.FP16),
        (None, Precision.BF16),
    ]


def test_every_rung_trains_on_the_whole_batch() -> None:
    assert {run.batch_size for run in _runs(",".join(_NAMES))} == {32}


@pytest.mark.parametrize("size", [0, 3, 5, 33, 64])
def test_micro_batches_divide_the_batch(size: int) -> None:
    assert refusal(_runs, f"micro-batch-{size}").rule == (
        "unknown-rung" if size == 0 else "ladder-batch-not-divisible"
    )


class _StoppedError(Exception):
    """Ends a launch once its settings are known."""


@pytest.mark.parametrize("name", [*_NAMES, ON_ONE_RANK, ON_MANY_RANKS])
def test_the_flags_of_a_rung_say_its_strategy_and_nothing_else(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: dict[str, Any] = {}

    def launch_script(*_: str, **settings: Any) -> LaunchedRun:
        said.update(settings)
        raise _StoppedError

    monkeypatch.setattr("zerofit.cli.launch.launch_script", launch_script)
    run = _runs(name)[-1]
    settings = launch_settings(run)
    with pytest.raises(_StoppedError):
        launch.main([*launch_flags(settings), "train.py"], standalone_mode=False)
    found = {field: value for field in FLAGS if (value := said[field]) is not None}
    assert {field: getattr(value, "value", value) for field, value in found.items() if field in settings} == {
        field: getattr(value, "value", value) for field, value in settings.items()
    }
    assert found.keys() == settings.keys()
    spec = RunSpec(overrides=settings_of(settings).overrides)
    assert choose(machine=machine(2), versions=VERSIONS, spec=spec).strategy == run.strategy
