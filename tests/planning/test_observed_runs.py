"""Observed peaks of similar runs replace or scale predictions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from captured_scripts import capture, captured_problem
from planning_problems import RATES, made_trace

from zerofit.core.capture import for_plan
from zerofit.core.estimates import Estimate, Holder, RunPhase
from zerofit.core.rank_observation import Phase
from zerofit.core.strategy import Strategy
from zerofit.core.units import GIB, format_bytes
from zerofit.machine.observations import Observation, ObservedPeak, subject_of
from zerofit.planning.observed_runs import ObservedRuns
from zerofit.planning.training_estimator import TrainingEstimator

_PROBLEM = captured_problem(capture())
_STRATEGY = Strategy(micro_batch_size=8, gradient_accumulation_steps=2)
_SMALLER = replace(_STRATEGY, micro_batch_size=4, gradient_accumulation_steps=4)


def _estimate(strategy: Strategy, *observations: Observation) -> Estimate:
    estimator = TrainingEstimator(
        _PROBLEM,
        trace=made_trace(_PROBLEM.model),
        rates=RATES,
        observed_runs=ObservedRuns(_PROBLEM, observations),
    )
    return estimator.estimate(strategy).estimate


_PREDICTED = _estimate(_STRATEGY)


def _reserved(estimate: Estimate, phase: RunPhase) -> int:
    found = estimate.device.of(phase)
    assert found is not None
    return found.held_by(Holder.TENSORS, Holder.CACHE)


def _peak(phase: Phase, num_bytes: int) -> ObservedPeak:
    return ObservedPeak(phase=phase, allocated_bytes=num_bytes, reserved_bytes=num_bytes)


_MOST = 2 * max(_reserved(_PREDICTED, phase.phase) for phase in _PREDICTED.device.phases)


def _observed(**fields: Any) -> Observation:
    capture_of_plan = for_plan(capture())
    ordinary: dict[str, Any] = {
        "at": "2026-11-20T10:00:00+00:00",
        "script": "train.py",
        "subject": subject_of(capture_of_plan, _PROBLEM.workload),
        "strategy": _STRATEGY,
        "topology": _PROBLEM.topology,
        "gpus": tuple(gpu.name for gpu in _PROBLEM.machine.gpus),
        "versions": _PROBLEM.versions,
        "num_steps": 5,
        "is_out_of_memory": False,
        "peaks": (_peak(Phase.BACKWARD, _MOST),),
        "host_bytes": GIB,
        "step_time_s": 3.0,
    }
    return Observation(**{**ordinary, **fields})


def test_the_same_plan_needs_what_was_observed() -> None:
    found = _estimate(_STRATEGY, _observed())
    assert _reserved(found, RunPhase.BACKWARD) == _MOST
    assert found.device.peak.phase is RunPhase.BACKWARD
    assert found.device.uncertainty < _PREDICTED.device.uncertainty
    predicted = format_bytes(_PREDICTED.device.peak.held_by(Holder.TENSORS, Holder.CACHE))
    assert found.device.uncertainty_source == (
        f"observed on this machine on 2026-11-20: {format_bytes(_MOST)} reserved, predicted {predicted}"
    )
    assert found.step_time is not None
    assert found.step_time.seconds == pytest.approx(3.0)
    assert "observed on this machine on 2026-11-20: 3 s, predicted " in found.step_time.uncertainty_source


def test_a_peak_below_the_prediction_lowers_all_phases_above_it() -> None:
    found = _estimate(_STRATEGY, _observed(peaks=(_peak(Phase.LOADING, GIB // 2),)))
    lowered = {phase.phase: _reserved(found, phase.phase) for phase in found.device.phases}
    assert lowered.pop(RunPhase.SAVE, 0) == _saving(_PREDICTED)  # which the run may not have come to
    assert max(lowered.values()) == GIB // 2


def _saving(estimate: Estimate) -> int:
    return _reserved(estimate, RunPhase.SAVE) if estimate.device.of(RunPhase.SAVE) else 0


def test_the_largest_of_several_runs_of_a_plan_counts() -> None:
    longer = _observed(peaks=(_peak(Phase.BACKWARD, _MOST),), at="2026-11-18T00:00:00+00:00")
    short = _observed(peaks=(_peak(Phase.BACKWARD, _MOST // 2),))
    assert _reserved(_estimate(_STRATEGY, short, longer), RunPhase.BACKWARD) == _MOST


def test_what_no_phase_covers_counts_as_the_largest_phase() -> None:
    found = _estimate(_STRATEGY, _observed(peaks=(_peak(Phase.EVALUATING, _MOST),)))
    assert _reserved(found, found.device.peak.phase) == _MOST


def test_another_micro_batch_is_scaled_and_as_uncertain_as_before() -> None:
    before, found = _estimate(_SMALLER), _estimate(_SMALLER, _observed())
    ratio = _MOST / _reserved(_PREDICTED, RunPhase.BACKWARD)
    expected = _reserved(before, RunPhase.BACKWARD) * ratio
    assert _reserved(found, RunPhase.BACKWARD) == pytest.approx(expected, abs=2)
    assert found.device.uncertainty == before.device.uncertainty
    assert "; scaled as observed on this machine on 2026-11-20: " in found.device.uncertainty_source
    assert found.step_time is not None
    assert before.step_time is not None
    assert _PREDICTED.step_time is not None
    slower = 3.0 / _PREDICTED.step_time.seconds
    assert found.step_time.seconds == pytest.approx(before.step_time.seconds * slower)


def test_out_of_memory_is_a_lower_bound_of_its_own_plan_alone() -> None:
    ended = _observed(is_out_of_memory=True, step_time_s=None)
    assert _reserved(_estimate(_STRATEGY, ended), RunPhase.BACKWARD) == _MOST
    low = replace(ended, peaks=(_peak(Phase.BACKWARD, 1),))
    assert _estimate(_STRATEGY, low).device.peak_bytes == _PREDICTED.device.peak_bytes
    assert _estimate(_SMALLER, ended) == _estimate(_SMALLER)


@pytest.mark.parametrize(
    "fields",
    [
        {"versions": replace(_PROBLEM.versions, torch="2.0.0")},
        {"subject": "another"},
        {"subject": ""},
        {"gpus": ("NVIDIA A10",) * 4},
        {"expandable_segments": True},
        {"topology": replace(_PROBLEM.topology, on_cpu=True)},
        {"strategy": replace(_STRATEGY, gradient_checkpointing=True)},
        {"peaks": (), "step_time_s": None},
    ],
)
def test_runs_of_another_kind_are_no_evidence(fields: dict[str, Any]) -> None:
    assert _estimate(_STRATEGY, _observed(**fields)) == _PREDICTED


def test_runs_on_other_versions_are_said_not_to_be_used() -> None:
    other = replace(_PROBLEM.versions, torch="2.0.0")
    assert ObservedRuns(_PROBLEM, (_observed(versions=other),)).notes == (
        "runs like this were observed on other versions, last on 2026-11-20: they are not used",
    )
    assert ObservedRuns(_PROBLEM, (_observed(),)).notes == ()
