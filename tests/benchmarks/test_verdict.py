"""Results of regret questions: ratios by hand, failures as text, and what fit."""

from __future__ import annotations

import pytest
from gpu_truth.results import RegretResult, Rule, Tried
from gpu_truth.verdict import best, is_cut_off, is_measured, is_whole, ratio, verdict
from measuring.results import TrialOutcome, TrialState

from zerofit.core.units import GIB


def _tried(
    state: TrialState | float,
    *repeats: float,
    name: str = "one",
    rule: Rule | None = None,
    predicted: int | None = None,
) -> Tried:
    """Return a strategy that ended so, or that took so many samples per second."""
    ran = isinstance(state, float)
    return Tried(
        name=name,
        strategy=None,
        outcome=TrialOutcome(state=TrialState.DONE if ran else state),
        samples_per_s=state if ran else None,
        repeats_samples_per_s=repeats,
        predicted_bytes=predicted,
        left_out=rule,
    )


def _result(choice: Tried | None, *grid: Tried, usual: tuple[Tried, ...] = ()) -> RegretResult:
    return RegretResult(
        key="made",
        model="bert-large-uncased",
        task="sequence-classification",
        sequence_length=128,
        global_batch_size=32,
        limit_bytes=GIB,
        choice=choice,
        grid=grid,
        usual=usual,
        date="2026-01-01T00:00:00+00:00",
    )


NOT_RUN, OUT_OF_MEMORY, FAILED = TrialState.NOT_RUN, TrialState.OUT_OF_MEMORY, TrialState.FAILED
SLOW = _tried(NOT_RUN, rule=Rule.SLOW)


@pytest.mark.parametrize(
    ("choice", "grid", "expected"),
    [
        (_tried(10.0), (_tried(8.0), _tried(12.5)), 0.8),
        (_tried(10.0), (_tried(8.0), _tried(OUT_OF_MEMORY), SLOW), 1.0),
        (_tried(10.0), (_tried(12.5), _tried(TrialState.TOO_SLOW)), 0.8),
        (_tried(10.0), (_tried(8.0), _tried(NOT_RUN)), None),
        (_tried(10.0), (_tried(8.0), _tried(FAILED)), None),
        (_tried(10.0), (_tried(8.0), _tried(TrialState.CANNOT_RUN)), None),
        (_tried(OUT_OF_MEMORY), (_tried(8.0),), None),
        (None, (_tried(8.0),), None),
        (_tried(10.0), (_tried(8.0), _tried(20.0, rule=Rule.SLOW)), 0.5),
    ],
)
def test_a_ratio_is_stated_only_where_all_that_the_rules_keep_was_run(
    choice: Tried | None, grid: tuple[Tried, ...], expected: float | None
) -> None:
    assert ratio(_result(choice, *grid)) == expected


def test_the_ratio_is_that_of_the_medians_of_the_choice_and_its_rival() -> None:
    result = _result(_tried(10.0, 9.0, 8.0), _tried(20.0, 12.0, 11.0, name="rival"), _tried(13.0))
    assert ratio(result) == 9.0 / 12.0
    assert verdict(result) == "0.75 (3 runs, 8.0 to 10.0/s)"


def test_a_rival_that_is_slower_when_it_runs_again_is_not_the_best() -> None:
    result = _result(_tried(10.0, 10.0, 10.0, name="choice"), _tried(11.0, 9.0, 9.0))
    found = best(result)
    assert found is not None
    assert (found.name, ratio(result)) == ("choice", 1.0)


@pytest.mark.parametrize(
    ("result", "measured", "whole", "cut_off"),
    [
        (_result(_tried(10.0, 10.0, 10.0), _tried(8.0, 8.0, 8.0), SLOW), True, True, False),
        (_result(_tried(10.0, 10.0), _tried(8.0, 8.0, 8.0)), True, False, True),
        (_result(_tried(10.0), _tried(8.0), _tried(NOT_RUN)), False, False, True),
        (_result(_tried(10.0), _tried(FAILED)), False, False, False),
        (_result(_tried(10.0), usual=(_tried(NOT_RUN),)), True, False, True),
        (_result(_tried(10.0), usual=(_tried(FAILED),)), True, False, False),
        (_result(_tried(OUT_OF_MEMORY), _tried(8.0)), True, True, False),
        (_result(None, _tried(8.0)), True, True, False),
    ],
)
def test_a_question_is_whole_once_nothing_has_to_run(
    result: RegretResult, measured: bool, whole: bool, cut_off: bool
) -> None:
    assert (is_measured(result), is_whole(result), is_cut_off(result)) == (measured, whole, cut_off)
