"""What a plan costs: GPUs x price x time, for 1,000 steps and for the run where its steps are known."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from captured_scripts import captured_problem
from planning_problems import problem, solved

from zerofit.cli.output.plan_compare import plan_comparison
from zerofit.cli.output.plan_json import plan_json
from zerofit.planning.cost import amount, cost_line, cost_of
from zerofit.planning.screen_table import first_screen
from zerofit.planning.solve import Answer

_ANSWERS = [solved(problem(num_gpus=number)) for number in (1, 4)]


@pytest.mark.parametrize("answer", _ANSWERS)
def test_the_cost_of_steps_is_gpus_times_hours_times_price(answer: Answer) -> None:
    cost = cost_of(answer, 3.6)
    time = answer.head.estimate.step_time
    assert cost is not None
    assert time is not None
    gpus = answer.problem.topology.world_size
    assert cost.per_1000_steps == pytest.approx(1000 * gpus * time.seconds * 3.6 / 3600)
    assert (cost.num_steps, cost.of_run) == (None, None)
    assert f"per 1,000 steps; {gpus} GPU" in str(cost)
    assert str(cost) in " ".join(first_screen(answer, price=3.6).split())
    assert "costs" not in first_screen(answer)


def test_the_cost_of_the_run_is_that_of_its_steps() -> None:
    cost = cost_of(_ANSWERS[0], 2.0)
    assert cost is not None
    run = replace(cost, num_steps=2500, steps_source="--max_steps 2500")
    assert run.of_run == pytest.approx(2.5 * run.per_1000_steps)
    assert "for the 2,500 steps of the run (--max_steps 2500)" in str(run)


def test_what_does_not_fit_has_no_cost() -> None:
    answer = solved(captured_problem(num_gpus=1, memory_gib=1, host_gib=1))
    assert cost_of(answer, 2.0) is None
    assert cost_line(answer, 2.0) == "cost unknown: nothing fits"


def test_machines_are_compared_by_cost_and_json_has_it_only_with_a_price() -> None:
    header = plan_comparison(_ANSWERS, prices=(0.5, 2.0)).splitlines()[2]
    assert header.endswith("per 1,000 steps")
    assert "per 1,000 steps" not in plan_comparison(_ANSWERS)
    plans = json.loads(plan_json(_ANSWERS, prices=(0.5, 2.0)))["plans"]
    assert [(plan["cost"]["per_gpu_hour"], plan["cost"]["num_gpus"]) for plan in plans] == [
        (0.5, 1),
        (2.0, 4),
    ]
    assert "cost" not in json.loads(plan_json(_ANSWERS))["plans"][0]


@pytest.mark.parametrize(
    ("cost", "text"), [(1234.5, "1,234.50"), (0.25, "0.25"), (0.0312, "0.031"), (0.1, "0.10")]
)
def test_amounts(cost: float, text: str) -> None:
    assert amount(cost) == text
