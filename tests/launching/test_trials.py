"""Which strategy is tried next, and what the table of trials says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from planning_problems import VERSIONS, machine

from zerofit.cli.output.tuning import tuning_table
from zerofit.configs.write.command import Rendezvous
from zerofit.core.estimates import (
    Estimate,
    Holder,
    MemoryEstimate,
    PhaseMemory,
    RunPhase,
    StepTime,
    Term,
    TimeTerm,
)
from zerofit.core.plan import Plan, Topology
from zerofit.core.strategy import Engine, Strategy, ZeroStage
from zerofit.core.units import GIB
from zerofit.launching.start import PlannedLaunch
from zerofit.launching.trials import TrialEnd, TrialResult, Tried, Tuning, next_to_try

_OUT_OF_MEMORY = TrialResult(end=TrialEnd.OUT_OF_MEMORY, cause="rank 0 ran out of GPU memory")
_STAGES = {0: Strategy()} | {
    stage: Strategy(engine=Engine.DEEPSPEED, zero_stage=ZeroStage(stage)) for stage in (1, 2, 3)
}


def _plan(stage: int, size: int, step_s: float | None, gib: int = 1, *, on_cpu: bool = False) -> Plan:
    """Return a plan of a ZeRO stage, 0 for DDP, with its predictions."""
    term = Term(name="all", num_bytes=gib * GIB, holder=Holder.TENSORS, formula="", source="")
    memory = MemoryEstimate(
        phases=(PhaseMemory(phase=RunPhase.STEP, terms=(term,)),), uncertainty=0.1, uncertainty_source=""
    )
    time = None
    if step_s is not None:
        terms = (TimeTerm(name="all", seconds=step_s, formula="", source=""),)
        time = StepTime(terms=terms, uncertainty=0.3, uncertainty_source="")
    return Plan(
        strategy=replace(_STAGES[stage], micro_batch_size=size, gradient_accumulation_steps=8 // size),
        topology=Topology(world_size=2, on_cpu=on_cpu),
        machine=machine(2),
        versions=VERSIONS,
        estimate=Estimate(device=memory, host=memory, step_time=time, tokens_per_step=1),
    )


def _took(seconds: float) -> TrialResult:
    return TrialResult(end=TrialEnd.MEASURED, step_time_s=seconds, host_bytes=GIB, gpu_bytes=2 * GIB)


_FAILED = TrialResult(end=TrialEnd.FAILED, cause="rank 0 exited with 1: KeyError")
_DDP = (_plan(0, 8, 1.0, 4), _plan(0, 4, 1.3, 3), _plan(0, 2, 2.0, 2))


@pytest.mark.parametrize(
    ("plans", "results", "following"),
    [
        pytest.param(_DDP, {}, 0, id="the planner's choice comes first"),
        pytest.param((_plan(3, 8, 2.0), *_DDP), {}, 0, id="be it slower than others"),
        pytest.param(_DDP, {1: _took(1.0)}, 0, id="or an earlier start had another choice"),
        pytest.param((*_DDP, _plan(1, 8, 1.2)), {0: _took(1.0)}, 3, id="then the fastest by prediction"),
        pytest.param(
            (*_DDP, _plan(1, 8, 1.4)), {0: _took(9.0), 3: _took(1.0)}, 1, id="no other was left than its own"
        ),
        pytest.param(
            (_DDP[0], _DDP[1], _plan(1, 8, 1.4), _plan(1, 4, 1.7)),
            {0: _took(9.0), 2: _took(1.4)},
            3,
            id="a family that is slower than predicted comes behind one that is not",
        ),
        pytest.param(
            (_plan(0, 8, 1.0), _plan(0, 4, 1.05), _plan(1, 8, 3.0)),
            {0: _took(1.0)},
            2,
            id="near-equals of one family come last",
        ),
        pytest.param((_plan(0, 8, 1.0), _plan(0, 4, 1.05)), {0: _took(1.0)}, 1, id="but they come"),
        pytest.param(_DDP, {0: _OUT_OF_MEMORY}, 1, id="less memory after none was left"),
        pytest.param(
            (_DDP[1], _DDP[0], _plan(1, 8, 5.0, 9)),
            {0: _OUT_OF_MEMORY},
            2,
            id="never more of the same family",
        ),
        pytest.param((_DDP[1], _DDP[0]), {0: _OUT_OF_MEMORY}, None, id="nor anything, where that is all"),
        pytest.param(_DDP, {0: _FAILED}, 1, id="a failure says nothing of the others"),
        pytest.param(
            (_plan(0, 8, None), _plan(1, 8, None), _plan(2, 8, None)), {0: _took(1.0)}, 1, id="without times"
        ),
        pytest.param(_DDP[:1], {0: _took(1.0)}, None, id="all were tried"),
    ],
)
def test_next_trial(plans: tuple[Plan, ...], results: dict[int, TrialResult], following: int | None) -> None:
    assert next_to_try(plans, results) == following


def _tuning(*results: tuple[Plan, TrialResult]) -> Tuning:
    rendezvous = Rendezvous(machine_rank=0, main_process_ip="127.0.0.1", main_process_port=29500)
    return Tuning(
        tried=tuple(
            Tried(
                launch=PlannedLaunch(plan=plan, target=("train.py",), rendezvous=rendezvous),
                result=result,
                is_kept=False,
            )
            for plan, result in results
        ),
        folder=Path("zerofit-runs/tune-train-0"),
        candidates=tuple(plan for plan, _ in results),
    )


def test_the_table_has_the_fastest_first_and_the_reasons_of_unmeasured_ones() -> None:
    tuning = _tuning(
        (_plan(0, 8, 0.4, 3), _OUT_OF_MEMORY), (_plan(1, 8, 0.5), _took(0.6)), (_plan(2, 8, 0.5), _took(0.55))
    )
    assert tuning_table(tuning, width=None) == (
        "   strategy  batch  step           predicted  ratio  GPU      predicted  host\n"
        ">  ZeRO-2    8 x 1  550 ms         500 ms     1.10   2.0 GiB  1.0 GiB    1.0 GiB\n"
        "   ZeRO-1    8 x 1  600 ms         500 ms     1.20   2.0 GiB  1.0 GiB    1.0 GiB\n"
        "   DDP       8 x 1  out of memory  400 ms     -      -        3.0 GiB    -\n"
        "\n"
        "fastest: ZeRO-2, micro-batches 8 x 1, 550 ms a step\n"
        "DDP, micro-batches 8 x 1: rank 0 ran out of GPU memory"
    )


def test_trials_on_cpu_ranks_are_not_compared_with_predictions_for_gpus() -> None:
    tuning = _tuning((_plan(1, 8, 0.5, on_cpu=True), _took(0.6)))
    assert tuning_table(replace(tuning, is_out_of_time=True), width=None).splitlines()[1:] == [
        ">  ZeRO-1    8 x 1  600 ms  500 ms     -      2.0 GiB  1.0 GiB    1.0 GiB",
        "",
        "fastest: ZeRO-1, micro-batches 8 x 1, 600 ms a step; it is also the planner's choice",
        "measured on CPU ranks; predictions are for the GPUs planned for",
        "the time budget is used up: the same command with a larger one continues",
    ]


def test_the_fastest_plan_has_its_measurement_as_reason() -> None:
    launch = _tuning((_plan(1, 8, 0.5), _took(0.6)), (_plan(2, 8, 0.5), _took(0.55))).launch
    assert launch is not None
    (reason,) = launch.plan.reasons
    assert (reason.field, reason.value) == ("zero_stage", "2")
    assert reason.why == "the fastest of 2 measured here, 550 ms per step"
    assert _tuning((_plan(0, 8, 0.4), _OUT_OF_MEMORY)).launch is None
