"""From a problem to an answer: reasons, losers, what helps where nothing fits, and shorter samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_problems import A100, RATES, made_trace, model, problem

from zerofit.core.estimates import Estimate, Holder, MemoryEstimate, PhaseMemory, RunPhase, Term
from zerofit.core.plan import Origin, plan_from_json, plan_to_json
from zerofit.core.request import Request
from zerofit.core.strategy import Engine, OffloadDevice, OptimizerName, ZeroStage
from zerofit.core.units import GIB
from zerofit.planning.candidates import candidates
from zerofit.planning.problem import Allow, Problem
from zerofit.planning.search import SAME_TIME, simplicity, tier
from zerofit.planning.solve import Answer, best_of, solve
from zerofit.planning.suggestions import with_more_host_memory
from zerofit.planning.training_estimator import ClosedFormEstimator

_LARGE = model(
    num_parameters=3_000_000_000,
    num_trainable_parameters=3_000_000_000,
    num_layers=30,
    hidden_size=2560,
    intermediate_size=10_240,
)


def _estimator(asked: Problem) -> ClosedFormEstimator:
    return ClosedFormEstimator(asked, trace=made_trace(asked.model), rates=RATES)


def _solve(asked: Problem, **options: Any) -> Answer:
    return solve(asked, estimator_of=_estimator, is_fast=True, **options)


def test_a_plan_carries_reasons_losers_and_its_estimate() -> None:
    answer = _solve(problem(num_gpus=4, memory_gib=6, sequence_length=512))
    plan = answer.plan
    assert answer.fits
    assert plan.estimate == answer.found.chosen.estimate if answer.found.chosen else None
    assert {reason.origin for reason in plan.reasons} == {Origin.PLANNER}
    assert {"precision", "micro_batch_size", "gradient_accumulation_steps"} <= {
        reason.field for reason in plan.reasons
    }
    assert len(plan.rejected) == sum(
        map(len, (answer.found.others, answer.found.ruled_out, answer.found.variants))
    )
    assert all(rejected.why for rejected in plan.rejected)
    assert plan_from_json(plan_to_json(plan), name="plan.json") == plan


@settings(max_examples=40, deadline=None)
@given(
    num_gpus=st.sampled_from([1, 2, 8]),
    memory_gib=st.integers(min_value=4, max_value=40),
    global_batch_size=st.sampled_from([16, 64, 512]),
    sequence_length=st.sampled_from([256, 1024, 4096]),
)
def test_no_plan_may_overflow_where_another_surely_fits_in_15_percent_more_time(
    num_gpus: int, memory_gib: int, global_batch_size: int, sequence_length: int
) -> None:
    asked = problem(
        num_gpus=num_gpus,
        memory_gib=memory_gib,
        global_batch_size=global_batch_size,
        sequence_length=sequence_length,
    )
    chosen, estimator = best_of(asked, _estimator), _estimator(asked)
    if chosen is None or estimator.has_room(chosen.strategy):
        return
    most = 1.15 * (estimator.seconds(chosen.strategy) or 0)
    others = (
        one
        for one in candidates(asked).strategies
        if tier(one) == tier(chosen.strategy) and (estimator.seconds(one) or 0) <= most
    )
    assert not any(map(estimator.has_room, others))


def test_what_the_user_fixed_is_said_to_be_the_users() -> None:
    request = Request(zero_stage=ZeroStage.PARAMETERS, gradient_checkpointing=True)
    plan = _solve(problem(request=request)).plan
    said = {reason.field: reason.why for reason in plan.reasons if reason.origin is Origin.FLAG}
    assert said == {
        "zero_stage": "--zero-stage says so",
        "gradient_checkpointing": "--gradient-checkpointing says so",
    }
    assert (plan.strategy.zero_stage, plan.strategy.gradient_checkpointing) == (3, True)


def test_more_host_memory_comes_in_powers_of_two() -> None:
    nodes = dict(with_more_host_memory(problem(num_gpus=1, host_gib=24).machine))
    assert list(nodes) == [f"{gib}.0 GiB of host memory on each node" for gib in (32, 64, 128, 256, 512)]
    assert [one.host_memory_bytes for one in nodes.values()] == [2**power for power in range(35, 40)]


@pytest.mark.slow
def test_each_suggestion_fits_by_itself() -> None:
    asked = problem(
        num_gpus=1, memory_gib=16, host_gib=24, global_batch_size=8, sequence_length=2048, facts=_LARGE
    )
    bigger = tuple(
        replace(A100, name=f"GPU of {size}", memory_bytes=size * GIB) for size in (12, 16, 24, 48, 96, 192)
    )
    answer = _solve(asked, gpus=bigger)
    changes = [suggestion.change for suggestion in answer.suggestions]
    assert not answer.fits
    assert changes == [
        "--allow lora",
        "--allow qlora",
        "128.0 GiB of host memory on each node",
        "512.0 GiB free on NVMe disks of each node",
        "4 x NVIDIA A100-SXM4-80GB in place of 1",
        "1 x GPU of 48 (48.0 GiB) on each node",
    ]
    assert all(suggestion.best.fits for suggestion in answer.suggestions)
    smaller = replace(asked, machine=replace(asked.machine, gpus=(bigger[2],)))
    assert not _solve(smaller).fits  # the 48 GiB are the smallest of these that do


@pytest.mark.parametrize("global_batch_size", [6, 12, 40])
def test_the_fewest_gpus_that_make_the_batch_and_fit_are_suggested(global_batch_size: int) -> None:
    kept = Request(optimizer_offload=OffloadDevice.NONE, param_offload=OffloadDevice.NONE)

    def ask(num_gpus: int) -> Problem:
        return problem(
            num_gpus=num_gpus,
            memory_gib=24,
            global_batch_size=global_batch_size,
            facts=_LARGE,
            request=kept,
        )

    suggestions = _solve(ask(1)).suggestions
    fewest = next(
        number
        for number in range(2, 9)
        if global_batch_size % number == 0 and best_of(ask(number), _estimator) is not None
    )
    assert f"{fewest} x NVIDIA A100-SXM4-80GB in place of 1" in [one.change for one in suggestions]


@pytest.mark.parametrize(
    ("memory_gib", "host_gib", "is_close"),
    [(40, 500, False), (21, 500, True), (40, 10.5, True)],
)
def test_an_estimate_is_close_where_its_uncertainty_goes_beyond_gpu_or_host(
    memory_gib: float, host_gib: float, is_close: bool
) -> None:
    def needs(size: int) -> MemoryEstimate:
        term = Term(name="weights", num_bytes=size * GIB, holder=Holder.TENSORS, formula="", source="")
        phases = (PhaseMemory(phase=RunPhase.STEP, terms=(term,)),)
        return MemoryEstimate(phases=phases, uncertainty=0.1, uncertainty_source="")

    estimate = Estimate(device=needs(20), host=needs(10), step_time=None, tokens_per_step=0)
    assert (
        problem(memory_gib=memory_gib, host_gib=host_gib).is_close(estimate.device, estimate.host) == is_close
    )


@pytest.mark.parametrize(("allow", "fits"), [((), False), ((Allow.LENGTH,), True)])
def test_samples_are_cut_only_when_allowed(allow: tuple[Allow, ...], fits: bool) -> None:
    asked = problem(
        num_gpus=1,
        memory_gib=4,
        host_gib=8,
        global_batch_size=1,
        sequence_length=4096,
        allow=frozenset(allow),
        request=Request(engine=Engine.NATIVE, gradient_checkpointing=False),
    )
    answer = _solve(asked)
    length = answer.plan.workload.sequence_length or 0
    assert (answer.fits, length < 4096) == (fits, fits)
    assert answer.notes == ((f"samples cut to {length} tokens, as --allow length says",) if fits else ())


def test_eight_bit_states_come_after_all_that_computes_the_same() -> None:
    asked = problem(num_gpus=1, memory_gib=1.6, host_gib=2, global_batch_size=1, sequence_length=128)
    strategy = _solve(asked).plan.strategy
    assert strategy.optimizer is OptimizerName.ADAMW_8BIT
    with_host = replace(asked, machine=replace(asked.machine, host_memory_available_bytes=64 * GIB))
    strategy = _solve(with_host).plan.strategy
    assert (strategy.optimizer, strategy.offloads) == (None, True)


def test_more_gpus_of_the_same_never_lose_a_fit() -> None:
    request = Request(optimizer_offload=OffloadDevice.NONE, param_offload=OffloadDevice.NONE)
    fits = [
        best_of(problem(num_gpus=number, memory_gib=14, facts=_LARGE, request=request), _estimator)
        is not None
        for number in (1, 2, 4, 8)
    ]
    assert fits == sorted(fits)
    assert set(fits) == {False, True}


_NVME = Request(optimizer_offload=OffloadDevice.NVME, param_offload=OffloadDevice.NONE)


@pytest.mark.parametrize(
    ("nvme_gib", "request_", "lacks"),
    [
        (100, _NVME, ""),
        (1, _NVME, "needs 1.6 GiB of 1.0 GiB on NVMe disks of each node"),
        (0, _NVME, "needs 1.6 GiB of none on NVMe disks of each node"),
        pytest.param(0, replace(_NVME, nvme_path="/disk"), "", id="a folder whose room is not known"),
    ],
)
def test_what_goes_to_nvme_has_to_have_room_there(nvme_gib: int, request_: Request, lacks: str) -> None:
    answer = _solve(problem(request=request_, machine_fields={"nvme_bytes": nvme_gib * GIB}))
    assert (answer.head.shortage, answer.fits) == (lacks, not lacks)
    unnamed = "/local_nvme for the folder on the NVMe disks: say --nvme-path"
    assert answer.notes == (() if request_.nvme_path else (unnamed,))


def test_the_simplest_of_those_that_take_as_long_is_chosen() -> None:
    answer = _solve(problem(num_gpus=8, memory_gib=80, sequence_length=1024))
    chosen = answer.found.chosen
    assert chosen
    assert chosen.estimate.step_time
    limit = chosen.estimate.step_time.seconds / (1 + SAME_TIME)
    fitting = [one for one in answer.found.others if one.fits]
    assert all(one.estimate.step_time and one.estimate.step_time.seconds >= limit for one in fitting)
    near = [
        one
        for one in fitting
        if one.estimate.step_time and one.estimate.step_time.seconds <= limit * (1 + SAME_TIME)
    ]
    assert all(simplicity(one.strategy) > simplicity(chosen.strategy) for one in near)
