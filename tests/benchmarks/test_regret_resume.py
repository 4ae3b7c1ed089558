"""Regret that is cut off: what ran is kept, and the next run goes on with the rest."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from gpu_truth.grid import Entry, Grid, Question
from gpu_truth.record import Record
from gpu_truth.regret import Means, measure_question
from gpu_truth.results import RegretResult
from gpu_truth.usual import PLAIN, usual_strategies
from gpu_truth.verdict import is_whole
from kept_cases import SMALL, measurement, regret_of
from measuring.results import TrialOutcome, TrialState

from zerofit.core.strategy import Strategy
from zerofit.core.units import GIB

LONG_S = 500.0
QUESTION = Question(
    key="made",
    model="bert-large-uncased",
    task="sequence-classification",
    sequence_length=16,
    global_batch_size=2,
    limit_bytes=2 * GIB,
)
_PLAIN = usual_strategies(QUESTION)[PLAIN]
CHOICE = replace(_PLAIN, gradient_checkpointing=True)
HALVES = replace(_PLAIN, micro_batch_size=1, gradient_accumulation_steps=2)
GRID = Grid(
    choice=CHOICE,
    entries=(
        Entry(strategy=HALVES, predicted_s=0.5, why="slow"),
        Entry(strategy=_PLAIN, predicted_s=1.0),
    ),
)
PRESET = next(one for one in usual_strategies(QUESTION).values() if one != _PLAIN)
FAILED = TrialOutcome(state=TrialState.FAILED, reason="it fell")


@pytest.fixture
def small(tmp_path: Path) -> Question:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SMALL), encoding="utf-8")
    return replace(QUESTION, key="small", model=str(file))


def _done(step_time_s: float) -> TrialOutcome:
    measured = measurement(step_time_s, tokens_per_s=32 / step_time_s, losses=())
    return TrialOutcome(state=TrialState.DONE, measured=measured)


def _record(*ended: tuple[Strategy, TrialOutcome], before: RegretResult | None = None) -> Record:
    record = Record(QUESTION, GRID, before)
    for strategy, outcome in ended:
        record.put(strategy, outcome)
    return record


def test_the_choice_runs_first_and_checks_on_the_rules_last() -> None:
    assert _record().left() == (CHOICE, _PLAIN, PRESET, HALVES)


@pytest.mark.parametrize(
    ("ended", "left"),
    [
        (_done(1.0), (CHOICE, PRESET, HALVES)),
        (TrialOutcome(state=TrialState.OUT_OF_MEMORY), (CHOICE, PRESET, HALVES)),
        (TrialOutcome(state=TrialState.TOO_SLOW), (CHOICE, PRESET, HALVES)),
        (FAILED, (CHOICE, _PLAIN, PRESET, HALVES)),
        (TrialOutcome(state=TrialState.CANNOT_RUN), (CHOICE, _PLAIN, PRESET, HALVES)),
    ],
)
def test_what_has_an_end_that_stands_is_not_run_again(
    ended: TrialOutcome, left: tuple[Strategy, ...]
) -> None:
    before = _record((_PLAIN, ended)).result()
    again = _record(before=before)
    assert again.left() == left
    assert again.result().grid[1].outcome == ended


def test_what_an_earlier_run_measured_stays_until_it_is_measured_again() -> None:
    before = _record((CHOICE, _done(1.0)), (_PLAIN, FAILED)).result()
    after = _record((HALVES, _done(2.0)), before=before).result()
    assert after.choice == before.choice
    assert [one.outcome for one in after.grid] == [_done(2.0), FAILED]
    assert (before.runs, after.runs) == (1, 2)


def test_another_question_of_the_same_key_is_measured_from_the_start() -> None:
    before = replace(_record((CHOICE, _done(1.0))).result(), limit_bytes=GIB)
    again = _record(before=before)
    assert again.left()[0] == CHOICE
    assert again.result().runs == 1


def test_choice_and_rival_run_again_by_turns_once_all_else_was_measured() -> None:
    record = _record((CHOICE, _done(1.0)), (_PLAIN, _done(0.5)))
    assert record.repeats_left() == ()
    record.put(HALVES, _done(0.8))
    assert record.repeats_left() == (CHOICE, _PLAIN, CHOICE, _PLAIN)
    record.put_repeat(CHOICE, _done(2.0))
    assert record.repeats_left() == (_PLAIN, CHOICE, _PLAIN)
    choice = record.result().choice
    assert choice is not None
    assert (choice.samples_per_s, choice.repeats_samples_per_s) == (2.0, (1.0,))
    assert _record(before=record.result()).repeats_left() == (_PLAIN, CHOICE, _PLAIN)


@pytest.mark.slow
def test_repeats_that_an_earlier_run_left_are_measured(small: Question, tmp_path: Path) -> None:
    first = Record(small, GRID)
    for strategy in (CHOICE, _PLAIN, HALVES, PRESET):
        first.put(strategy, _done(0.01 if strategy is _PLAIN else 1.0))
    first.put_trainer(_done(1.0))
    for strategy in first.repeats_left()[:2]:
        first.put_repeat(strategy, _done(1.0))
    before = first.result()
    told: list[RegretResult] = []
    means = Means(
        folder=tmp_path,
        ends_at=time.monotonic() + LONG_S,
        lookahead=1,
        on_cpu=True,
        has_cpu_adam=False,
    )
    result = measure_question(small, GRID, means, keep=told.append, before=before)
    assert not is_whole(before)
    assert is_whole(result)
    assert len(told) == 2
    assert result.choice is not None
    assert result.choice.repeats_samples_per_s[0] == 2.0
    assert [len(one.repeats_samples_per_s) for one in (result.choice, *result.grid)] == [2, 0, 2]


def _running(folder: Path) -> list[bytes]:
    """Return the command lines of processes that work on a folder."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(file.read_bytes())
    return [one for one in found if str(folder).encode() in one]


@pytest.mark.evidence
def test_ctrl_c_keeps_what_ran_and_the_next_run_goes_on(
    small: Question, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "traces"))

    def run(*before: RegretResult) -> RegretResult:
        """Return what is kept when Ctrl-C comes, which it does while the first run's end is being kept."""
        kept: list[RegretResult] = []

        def keep(result: RegretResult) -> None:
            kept.append(result)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            regret_of(tmp_path, small, keep=keep, lookahead=0, before=before)
        assert _running(tmp_path) == []
        (result,) = kept
        return result

    first = run()
    assert first.choice is not None
    assert _states(first) == {first.choice.strategy: TrialState.DONE}
    second = run(first)
    assert second.choice == first.choice
    assert len(_states(second)) == 2
    assert set(_states(second).values()) == {TrialState.DONE}
    assert (first.runs, second.runs) == (1, 2)


def _states(result: RegretResult) -> dict[Strategy | None, TrialState]:
    """Return how each strategy ended that ran."""
    tried = (*((result.choice,) if result.choice else ()), *result.grid, *result.usual)
    return {one.strategy: one.outcome.state for one in tried if one.outcome.state is not TrialState.NOT_RUN}
