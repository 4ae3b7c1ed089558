"""Errors of predictions: arithmetic by hand, over results made for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gpu_truth.errors import (
    ALL,
    Quantity,
    case_errors,
    summaries,
    summaries_by_trait,
)
from gpu_truth.fits import Fits, fits_of_cases
from gpu_truth.results import Case, CaseResult
from kept_cases import measurement, result_of
from measuring.results import TensorBytes, TrialMeasurement, TrialOutcome, TrialPrediction, TrialState

from zerofit.core.strategy import Strategy


def _case(key: str, *, group: str = "bert", calibrates: bool = False) -> Case:
    return Case(
        key=key,
        group=group,
        model="gpt2",
        task="causal-lm",
        strategy=Strategy(micro_batch_size=1, gradient_accumulation_steps=1),
        sequence_length=8,
        calibrates=calibrates,
    )


def _parts(weights: int, states: int = 0) -> TensorBytes:
    return TensorBytes(weights=weights, gradients=100, optimizer_states=states, activations=None)


def _on_gpu(
    key: str, *, measured: int, predicted: int, group: str = "bert", calibrates: bool = False
) -> CaseResult:
    """Return a result whose allocated, reserved and device memory are all off by the same."""
    sizes = {"allocated_bytes": measured, "reserved_bytes": measured, "device_bytes": measured}
    return _result(
        _case(key, group=group, calibrates=calibrates),
        measurement(0.5, **sizes),
        TrialPrediction(
            parts=_parts(1),
            allocated_bytes=predicted,
            reserved_bytes=predicted,
            device_bytes=predicted,
            step_time_s=0.25,
        ),
    )


def _result(case: Case, measured: TrialMeasurement, predicted: TrialPrediction) -> CaseResult:
    return result_of(case, TrialOutcome(state=TrialState.DONE, measured=measured), predicted)


def test_an_error_is_above_zero_where_too_much_was_predicted() -> None:
    (allocated, *_) = case_errors([_on_gpu("a", measured=100, predicted=110)])
    assert allocated.quantity is Quantity.ALLOCATED
    assert allocated.error == pytest.approx(0.1)


def test_on_a_gpu_the_allocator_and_the_time_are_compared() -> None:
    found = [one.quantity.value for one in case_errors([_on_gpu("a", measured=100, predicted=110)])]
    assert found == ["allocated", "reserved", "device", "step time"]


def test_on_the_cpu_counted_tensors_are_compared_and_nothing_with_nothing_is_not() -> None:
    predicted = TrialPrediction(parts=_parts(105))
    result = _result(_case("a"), measurement(0.5, counted=_parts(100)), predicted)
    found = {one.quantity.value: round(one.error, 6) for one in case_errors([result])}
    assert found == {"weights": 0.05, "gradients": 0.0}


def test_statistics_are_of_sizes_without_signs_by_group_and_in_all() -> None:
    results = [
        *(_on_gpu(f"b{number}", measured=100, predicted=100 + number) for number in range(1, 10)),
        _on_gpu("b10", measured=100, predicted=70),
        _on_gpu("v", measured=100, predicted=140, group="vit"),
    ]
    found = {one.group: one for one in summaries(case_errors(results)) if one.quantity is Quantity.RESERVED}
    assert list(found) == ["bert", "vit", ALL]
    bert = found["bert"]
    assert (bert.num_cases, bert.worst_key) == (10, "b10")
    assert [round(size, 6) for size in (bert.median, bert.percentile_90, bert.worst)] == [0.055, 0.09, 0.3]
    assert (found[ALL].num_cases, found[ALL].worst_key, round(found[ALL].worst, 6)) == (11, "v", 0.4)


def test_what_did_not_run_or_has_no_prediction_has_no_error() -> None:
    done = _on_gpu("a", measured=100, predicted=110)
    full = TrialOutcome(state=TrialState.OUT_OF_MEMORY, reason="full")
    not_done, unpredicted = replace(done, outcome=full), replace(done, predicted=None)
    assert case_errors([not_done, unpredicted]) == ()


def test_statistics_by_trait_count_a_case_once_in_each() -> None:
    plain, recomputing = _on_gpu("a", measured=100, predicted=110), _on_gpu("b", measured=100, predicted=130)
    strategy = replace(recomputing.case.strategy, gradient_checkpointing=True)
    results = [plain, replace(recomputing, case=replace(recomputing.case, strategy=strategy))]
    found = [one for one in summaries_by_trait(case_errors(results)) if one.quantity is Quantity.RESERVED]
    assert [(one.group, one.num_cases, round(one.worst, 6)) for one in found] == [
        ("checkpointing", 1, 0.3),
        ("format: fp32", 2, 0.3),
        ("optimizer: adamw foreach", 2, 0.3),
    ]


@pytest.mark.parametrize(
    ("predicted", "state", "expected"),
    [
        (1000, TrialState.DONE, Fits(num_right=1, did_not=(), did=())),
        (1001, TrialState.OUT_OF_MEMORY, Fits(num_right=1, did_not=(), did=())),
        (1000, TrialState.OUT_OF_MEMORY, Fits(num_right=0, did_not=("a",), did=())),
        (1001, TrialState.DONE, Fits(num_right=0, did_not=(), did=("a",))),
        (1001, TrialState.TOO_SLOW, Fits(num_right=0, did_not=(), did=())),
    ],
)
def test_what_was_predicted_to_fit_is_compared_with_what_did(
    predicted: int, state: TrialState, expected: Fits
) -> None:
    result = replace(_on_gpu("a", measured=100, predicted=predicted), outcome=TrialOutcome(state=state))
    assert fits_of_cases([result], memory_bytes=1000) == expected
