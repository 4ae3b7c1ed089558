"""Rungs by their names, what they change and come to on top of each other; ladders to JSON and back."""

from __future__ import annotations

import pytest
from ladders import not_counted, on_cpu, on_gpu
from pydantic import TypeAdapter
from refusals import refusal

from zerofit.core.strategy import Lora, OptimizerName, Precision, Quantization
from zerofit.measuring.ladder import (
    DEFAULT_RUNGS,
    PUBLISHED_MODEL,
    Ladder,
    LadderRun,
    Published,
    baseline,
    changes,
    climb,
    ladder_to_json,
    parse_rungs,
    published_of,
    rung_names,
)
from zerofit.measuring.results import peak_of

_BASE = baseline(batch_size=32, sequence_length=128, attention="eager")


def _runs(text: str, *, is_cumulative: bool = True) -> list[LadderRun]:
    return [step.run for step in climb(parse_rungs(text), _BASE, is_cumulative=is_cumulative)]


def _changes(text: str, *, is_cumulative: bool = True) -> list[tuple[str, list[str]]]:
    steps = climb(parse_rungs(text), _BASE, is_cumulative=is_cumulative)
    return [(step.label, [*changes(step.before, step.run)]) for step in steps]


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("accumulation", "gradient_accumulation_steps", 32),
        ("micro-batch-8", "gradient_accumulation_steps", 4),
        ("checkpointing", "gradient_checkpointing", True),
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
    names = [name.replace("N", "4") for name in rung_names()]
    runs = _runs(",".join(names), is_cumulative=False)
    assert {run.strategy.optimizer for run in runs} == {None, *OptimizerName}
    assert [name for name, run in zip(names, runs, strict=True) if run == _BASE] == ["baseline"]


def test_each_rung_stands_on_those_before_it() -> None:
    assert _changes(DEFAULT_RUNGS) == [
        ("baseline", []),
        ("+ accumulation", ["micro_batch_size 32 -> 1", "gradient_accumulation_steps 1 -> 32"]),
        ("+ gradient checkpointing", ["gradient_checkpointing off -> on"]),
        ("+ Adafactor", ["optimizer none -> adafactor"]),
        ("+ frozen blocks", ["freeze nothing -> blocks"]),
        ("+ length 64", ["sequence_length 128 -> 64"]),
    ]
    last = _runs(DEFAULT_RUNGS)[-1]
    assert (last.sequence_length, last.strategy.micro_batch_size) == (64, 1)
    assert last.strategy.gradient_checkpointing
    assert last.strategy.optimizer is OptimizerName.ADAFACTOR


def test_alone_each_rung_stands_on_the_baseline() -> None:
    bf16, sgd = _runs("bf16,sgd", is_cumulative=False)
    assert sgd.strategy.precision is Precision.FP32
    assert bf16.strategy.optimizer is None


def test_the_order_is_the_users_and_baseline_goes_back_to_the_start() -> None:
    assert _changes("sgd, BF16,baseline,length_64") == [
        ("+ SGD", ["optimizer none -> sgd"]),
        ("+ bf16", ["precision fp32 -> bf16"]),
        ("baseline", []),
        ("+ length 64", ["sequence_length 128 -> 64"]),
    ]
    assert _runs("sgd,bf16")[-1] == _runs("bf16,sgd")[-1]


def test_every_rung_trains_on_the_whole_batch() -> None:
    names = [name.replace("N", "4") for name in rung_names()]
    assert {run.batch_size for run in _runs(",".join(names))} == {32}


@pytest.mark.parametrize("size", [0, 3, 5, 33, 64])
def test_micro_batches_divide_the_batch(size: int) -> None:
    assert refusal(_runs, f"micro-batch-{size}").rule == (
        "unknown-rung" if size == 0 else "ladder-batch-not-divisible"
    )


_DEFAULT = _runs(DEFAULT_RUNGS)


@pytest.mark.parametrize(
    ("model", "base", "run", "expected"),
    [
        (PUBLISHED_MODEL, _BASE, _DEFAULT[0], Published(memory_g=15.1, epoch_time_s=44.1)),
        (PUBLISHED_MODEL, _BASE, _DEFAULT[5], Published(memory_g=3.4, epoch_time_s=110.0)),
        (PUBLISHED_MODEL, _BASE, _runs("adafactor")[0], None),
        ("bert-large-uncased", _BASE, _DEFAULT[0], None),
        (PUBLISHED_MODEL, baseline(batch_size=16, sequence_length=128, attention="eager"), _DEFAULT[0], None),
        (PUBLISHED_MODEL, baseline(batch_size=32, sequence_length=64, attention="eager"), _DEFAULT[0], None),
    ],
)
def test_published_figures_stand_beside_the_same_run_only(
    model: str, base: LadderRun, run: LadderRun, expected: Published | None
) -> None:
    assert published_of(model, base, run) == expected


def test_a_ladder_comes_back_from_its_json_as_it_was() -> None:
    for ladder in (on_cpu(), on_gpu(), not_counted()):
        assert TypeAdapter(Ladder).validate_json(ladder_to_json(ladder)) == ladder


def test_rungs_are_compared_by_torchs_peak_on_a_gpu_and_by_the_process_elsewhere() -> None:
    for ladder, field in ((on_cpu(), "process_bytes"), (on_gpu(), "allocated_bytes")):
        measured = ladder.rungs[0].measured
        assert measured is not None
        assert peak_of(measured) == getattr(measured, field)
