"""A model that can't be traced is estimated by its dimensions, and the plan says so."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
from captured_scripts import capture, captured_problem

from zerofit.cli.output.plan_why import plan_why
from zerofit.core.capture import Capture
from zerofit.core.errors import UserError
from zerofit.core.observer import Observer
from zerofit.core.plan import plan_to_json
from zerofit.core.rank_observation import Phase
from zerofit.core.request import Request
from zerofit.core.units import GIB
from zerofit.machine.observations import Observation, ObservedPeak, subject_of, write_observation
from zerofit.planning.inputs import ModelFlags
from zerofit.planning.planner import Planner

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class Untraceable:
    """A captured script whose model can't be traced."""

    capture: Capture
    rule: str = "trace-broken"
    is_fast: bool = False

    name = "made"
    notes = ()

    @property
    def flags(self) -> ModelFlags:
        return ModelFlags(is_fast=self.is_fast)

    @property
    def facts(self) -> Any:
        return self.capture.model.facts

    def trace(self, request: Any, *, on_progress: Any) -> Any:
        raise UserError(self.rule, "no trace", found="sparse tensors", why="", fix="")


def _answer(captured: Capture, *, request: Request | None = None, **fields: Any) -> Any:
    planner = Planner(Untraceable(captured, **fields), observer=Observer())
    return planner.answer(captured_problem(captured, request=request), is_here=False)


def test_closed_forms_take_the_place_of_a_trace_that_fails() -> None:
    answer = _answer(capture())
    assert answer.is_fast
    assert answer.found.chosen.estimate.device.uncertainty == 0.2
    assert answer.notes[0] == (
        "the model can't be traced (sparse tensors): estimated by its dimensions, as with --fast"
    )


def test_what_the_user_can_mend_is_an_error_still() -> None:
    with pytest.raises(UserError, match="trace-packed-batch"):
        _answer(capture(), rule="trace-packed-batch")


def test_closed_forms_count_the_rows_of_a_sample() -> None:
    one, two = (
        _answer(replace(capture(), rows_per_sample=rows), request=Request(micro_batch_size=8)).found.chosen
        for rows in (1, 2)
    )
    assert two.estimate.tokens_per_step == 2 * one.estimate.tokens_per_step
    assert _activations(two) == pytest.approx(2 * _activations(one), rel=0.05)


def _activations(chosen: Any) -> int:
    terms = [term for phase in chosen.estimate.device.phases for term in phase.terms]
    return max(term.num_bytes for term in terms if term.name == "activations")


@pytest.mark.parametrize("is_here", [True, False])
def test_a_plan_for_this_machine_goes_by_what_was_observed_on_it(
    is_here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = _answer(capture())
    problem, plan = before.problem, before.plan
    observed = Observation(
        at="2026-11-20T10:00:00+00:00",
        script="train.py",
        subject=subject_of(plan.capture, plan.workload),
        strategy=plan.strategy,
        topology=plan.topology,
        gpus=tuple(gpu.name for gpu in plan.machine.gpus),
        versions=plan.versions,
        num_steps=5,
        is_out_of_memory=False,
        peaks=(ObservedPeak(phase=Phase.BACKWARD, allocated_bytes=4 * GIB, reserved_bytes=5 * GIB),),
        host_bytes=GIB,
        step_time_s=plan.estimate.step_time.seconds,
    )
    write_observation(observed)
    planner = Planner(Untraceable(capture(), is_fast=True), observer=Observer())
    answer = planner.answer(problem, is_here=is_here)
    assert answer.plan.strategy == plan.strategy
    assert ("observed on this machine on 2026-11-20: 5.0 GiB reserved" in plan_why(answer)) is is_here
    assert ("observed on this machine on 2026-11-20" in plan_to_json(answer.plan)) is is_here
