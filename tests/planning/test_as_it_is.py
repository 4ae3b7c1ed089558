"""The answer for a script: whether it fits as it is, what changes if not, and what would help."""

from __future__ import annotations

from dataclasses import replace

import pytest
from captured_scripts import capture, captured_problem
from planning_problems import RATES, made_trace, model, problem

from zerofit.core.request import Request
from zerofit.core.strategy import Precision, Quantization, Strategy
from zerofit.planning.plan_table import as_it_is_lines, plan_table
from zerofit.planning.problem import Allow, Problem
from zerofit.planning.solve import Answer, script_as_it_is, solve, wins
from zerofit.planning.training_estimator import ClosedFormEstimator

_OWN = Strategy(
    precision=Precision.FP32,
    micro_batch_size=8,
    gradient_accumulation_steps=2,
    gradient_checkpointing=False,
)
_LARGE = model(
    num_parameters=3_000_000_000,
    num_trainable_parameters=3_000_000_000,
    num_layers=30,
    hidden_size=2560,
    intermediate_size=10_240,
)


def _solve(asked: Problem) -> Answer:
    return solve(
        asked,
        estimator_of=lambda one: ClosedFormEstimator(one, trace=made_trace(one.model), rates=RATES),
        is_fast=True,
    )


def test_a_script_that_fits_runs_as_it_is_and_keeps_fp32() -> None:
    answer = _solve(captured_problem(num_gpus=1))
    assert answer.plan.strategy == _OWN == script_as_it_is(answer.problem)
    first, *_, hint, flag = as_it_is_lines(answer)
    assert first == "your script as it is: 5.7 GiB ±20% of 80.0 GiB, fits; nothing is changed"
    assert hint == "hint: --mixed-precision bf16 is about 6.3 x faster and rounds more;"
    assert flag == "      --fastest takes it"


def test_one_that_does_not_fit_keeps_fp32_where_smaller_micro_batches_help() -> None:
    answer = _solve(captured_problem(num_gpus=1, memory_gib=5))
    strategy = answer.plan.strategy
    assert strategy.precision is Precision.FP32
    assert (strategy.micro_batch_size or 0) * (strategy.gradient_accumulation_steps or 0) == 16
    first, *_ = as_it_is_lines(answer)
    assert first == "your script as it is: 5.7 GiB ±20% of 5.0 GiB, does not fit"


def test_16_bits_come_before_offload_where_fp32_does_not_fit_on_the_gpus() -> None:
    sizes = (5.0, 4.5, 4.0, 3.5, 3.0, 2.5, 2.2, 2.0)
    chosen = [_solve(captured_problem(num_gpus=1, memory_gib=size)).plan.strategy for size in sizes]
    ways = [(one.offloads, one.precision) for one in chosen if one.optimizer is None]
    order = [(False, Precision.FP32), (False, Precision.BF16), (True, Precision.FP32), (True, Precision.BF16)]
    places = [order.index(way) for way in ways]
    assert places == sorted(places)


def test_the_fastest_is_taken_in_16_bits() -> None:
    answer = _solve(captured_problem(num_gpus=1, takes_fastest=True))
    assert answer.plan.strategy.precision is Precision.BF16
    assert answer.in_16_bits is None
    first, *_ = as_it_is_lines(answer)
    assert first == "your script as it is: 5.7 GiB ±20% of 80.0 GiB, fits; changed: about 6.3 x faster"


@pytest.mark.parametrize(
    ("captured", "precision"),
    [
        (capture(mixed_precision="bf16"), Precision.BF16),
        (capture(names_precision=True), Precision.FP32),
        (capture(model_weight_dtype="bfloat16"), Precision.FP32),  # no autocast over weights of 16 bits
    ],
)
def test_what_the_script_names_is_kept_without_a_hint(captured: object, precision: Precision) -> None:
    answer = _solve(captured_problem(captured, num_gpus=1))  # type: ignore[arg-type]
    assert answer.plan.strategy == replace(_OWN, precision=precision)


def test_what_computes_the_same_is_taken_only_where_it_wins_more_than_its_uncertainty() -> None:
    answer = _solve(captured_problem(num_gpus=1))
    own = answer.as_it_is
    assert own is not None
    time = own.estimate.step_time
    assert time is not None

    def faster(share: float) -> bool:
        quicker = replace(time, terms=tuple(replace(one, seconds=one.seconds * share) for one in time.terms))
        return wins(replace(own, estimate=replace(own.estimate, step_time=quicker)), own)

    assert [faster(share) for share in (1.0, 0.8, 0.7)] == [False, False, True]


def test_one_that_asks_for_an_engine_itself_is_not_said_to_fit() -> None:
    answer = _solve(captured_problem(capture(engine="FSDP")))
    assert (answer.as_it_is, as_it_is_lines(answer)) == (None, [])


def test_where_nothing_fits_free_changes_come_first_as_commands_to_paste() -> None:
    typed = (("zerofit", "plan", "--gpus", "1xL4"), ("train.py", "--lr", "1 2"))
    asked = captured_problem(
        capture(model_facts=_LARGE, model_loads_weights=True),
        num_gpus=1,
        memory_gib=16,
        host_gib=24,
        request=Request(typed=typed),
    )
    answer = _solve(asked)
    text = plan_table(answer)
    assert [one.change for one in answer.suggestions][:2] == ["--allow lora", "--allow qlora"]
    for allowed in ("lora", "qlora"):
        assert f"\n    zerofit plan --gpus 1xL4 --allow {allowed} train.py --lr '1 2'\n" in text
    assert text.index("--allow qlora") < text.index("of host memory on each node:")


def test_allowed_qlora_quantizes_what_adapters_stand_beside() -> None:
    asked = problem(
        num_gpus=1,
        memory_gib=6,
        host_gib=24,
        global_batch_size=8,
        facts=_LARGE,
        allow=frozenset({Allow.QLORA}),
    )
    answer = _solve(asked)
    strategy = answer.plan.strategy
    assert strategy.lora is not None
    assert (strategy.quantization, strategy.offloads) == (Quantization.NF4, False)
    why = "nothing fits while every weight trains, and --allow qlora says so"
    reasons = {reason.field: reason.why for reason in answer.plan.reasons}
    assert (reasons["lora"], reasons["quantization"]) == (why, why)
