"""A model that can't be traced is estimated by its dimensions, and the plan says so."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from captured_scripts import capture, captured_problem
from planning_problems import spec_of

from zerofit.cli.output.plan_why import plan_why
from zerofit.core.allocation_log import Trace, TraceRequest
from zerofit.core.capture import Capture
from zerofit.core.errors import UserError
from zerofit.core.observer import Observer
from zerofit.core.plan import plan_to_json
from zerofit.core.rank_observation import Phase
from zerofit.core.units import GIB
from zerofit.machine.observations import Observation, ObservedPeak, subject_of, write_observation
from zerofit.planning.answer_lines import as_it_is_words
from zerofit.planning.estimate.closed_form.log import closed_form_log
from zerofit.planning.options import MachineFlags
from zerofit.planning.planner import Planner
from zerofit.planning.run_spec import RunSpec
from zerofit.planning.subject import Subject, subject_of_capture

if TYPE_CHECKING:
    from pathlib import Path


def _untraceable(captured: Capture, *, rule: str = "trace-broken") -> Subject:
    """Return a captured script whose model can't be traced."""

    def trace(*_: Any) -> Any:
        raise UserError(rule, "no trace", found="sparse tensors", why="", fix="")

    return replace(subject_of_capture(captured), tracer=trace)


_THERE = RunSpec(described=MachineFlags(gpus="4xA100-80G"))


def _answer(captured: Capture, *, spec: RunSpec = _THERE, **fields: Any) -> Any:
    planner = Planner(_untraceable(captured, **fields), is_fast=False, observer=Observer())
    return planner.answer(captured_problem(captured, spec=replace(spec, described=_THERE.described)))


def test_closed_forms_take_the_place_of_a_trace_that_fails() -> None:
    answer = _answer(capture())
    assert answer.is_fast
    assert answer.found.chosen.estimate.device.uncertainty == 0.2
    assert answer.notes[0] == (
        "the model can't be traced (sparse tensors): estimated by its dimensions, as with --fast"
    )


def test_a_model_without_dimensions_is_not_estimated_by_them() -> None:
    captured = capture()
    facts = replace(captured.model.facts, hidden_size=0)
    with pytest.raises(UserError, match="trace-broken"):
        _answer(replace(captured, model=replace(captured.model, facts=facts)))


@pytest.mark.parametrize("is_cold", [True, False])
def test_a_verdict_on_the_script_is_told_after_its_trace_and_before_the_search(is_cold: bool) -> None:
    told: list[tuple[str, int]] = []
    requests: list[TraceRequest] = []
    captured = capture()

    class Telling(Observer):
        def say(self, sentence: str) -> None:
            told.append((sentence, len(requests)))

    def trace(request: TraceRequest, on_progress: Any) -> Trace:
        requests.append(request)
        if is_cold:
            on_progress("the script's own model")
        return Trace(request=request, logs=(closed_form_log(captured.model.facts, request),))

    subject = replace(subject_of_capture(captured), tracer=trace)
    planner = Planner(subject, is_fast=False, observer=Telling())
    answer = planner.answer(captured_problem(captured, spec=_THERE))
    assert len(requests) > 1
    if is_cold:
        ((sentence, num_requests),) = told
        assert num_requests == 1
        assert sentence == f"{as_it_is_words(answer.as_it_is, answer.problem)}; {_LOOKS_ON}"
    else:
        assert told == []


@pytest.mark.parametrize(("is_cold", "announced"), [(True, 1), (False, 0)])
def test_it_is_told_once_that_a_named_model_is_traced(is_cold: bool, announced: int) -> None:
    told, captured = list[str](), capture()

    class Telling(Observer):
        def announce(self, title: str) -> None:
            told.append(title)

    def trace(request: TraceRequest, on_progress: Any) -> Trace:
        if is_cold:
            on_progress("micro-batch 1")
            on_progress("micro-batch 5")
        return Trace(request=request, logs=(closed_form_log(captured.model.facts, request),))

    subject = replace(subject_of_capture(captured), capture=None, tracer=trace)
    Planner(subject, is_fast=False, observer=Telling()).answer(captured_problem(captured, spec=_THERE))
    assert told == announced * [f"tracing {subject.name}; the next plan of it is quicker"]


_LOOKS_ON = "looking for what fits and is faster ..."


def test_what_the_user_can_mend_is_an_error_still() -> None:
    with pytest.raises(UserError, match="trace-packed-batch"):
        _answer(capture(), rule="trace-packed-batch")


def test_closed_forms_count_the_rows_of_a_sample() -> None:
    one, two = (
        _answer(replace(capture(), rows_per_sample=rows), spec=spec_of(micro_batch_size=8)).found.chosen
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
    planner = Planner(_untraceable(capture()), is_fast=True, observer=Observer())
    spec = replace(problem.spec, described=MachineFlags() if is_here else _THERE.described)
    answer = planner.answer(replace(problem, spec=spec))
    assert answer.plan.strategy == plan.strategy
    assert ("observed on this machine on 2026-11-20: 5.0 GiB reserved" in plan_why(answer)) is is_here
    assert ("observed on this machine on 2026-11-20" in plan_to_json(answer.plan)) is is_here
