"""The time limit of a job: predicted or set by the user, with what it follows from."""

from __future__ import annotations

import pytest

from zerofit.core.run_length import RunLength
from zerofit.launching.clusters.run_time import RunTime, time_sentences

_STEPS = RunLength(
    num_steps=96,
    source="train.py:17",
    num_samples=2048,
    num_epochs=3,
    global_batch_size=64,
    steps_per_epoch=32,
)
_TRAINS = "trains 96 steps: 2048 samples / 64 per step = 32 steps per epoch, 3 epochs (train.py:17)"
_SUM = "96 steps x 5.59 s +30% = 11 min 38 s, plus 30 min for loading, evaluation and saving"
_OF_MICRO_BATCHES = RunLength(num_steps=96, source="train.py:17", micro_batches=4)
_UNKNOWN = RunLength(num_steps=None, source="its data has no length, and it sets no max_steps")
_DEFAULT = "the cluster's default limit applies"


def _time(length: RunLength = _STEPS, step_time_s: float | None = 5.59) -> RunTime:
    return RunTime(length=length, step_time_s=step_time_s, uncertainty=0.3)


@pytest.mark.parametrize(
    ("length", "step_time_s", "wall_time_s"),
    [(_STEPS, 5.59, 2498), (_STEPS, 0.001, 1801), (_UNKNOWN, 5.59, None), (_STEPS, None, None)],
)
def test_a_run_takes_its_steps_and_half_an_hour(
    length: RunLength, step_time_s: float | None, wall_time_s: int | None
) -> None:
    time = _time(length, step_time_s)
    assert time.wall_time_s == wall_time_s
    assert time.as_json()["predicted_s"] == wall_time_s
    assert bool(time.missing) == (wall_time_s is None)
    assert bool(time.sum_words) == (wall_time_s is not None)


@pytest.mark.parametrize(
    ("time", "said_s", "default", "restarts", "sentences"),
    [
        (_time(), None, _DEFAULT, True, (_TRAINS, f"time limit 41 min 38 s: {_SUM}")),
        (_time(), None, None, True, (_TRAINS, f"takes about 41 min 38 s: {_SUM}")),
        (
            _time(_OF_MICRO_BATCHES),
            None,
            None,
            False,
            (
                "trains 96 steps of 4 batches each (train.py:17)",
                "takes about 1 h 16 min: 96 steps x 4 x 5.59 s +30% = 46 min 31 s, plus 30 min for loading, "
                "evaluation and saving",
            ),
        ),
        (
            _time(),
            7200,
            _DEFAULT,
            True,
            (_TRAINS, f"time limit 2 h 0 min, by --time; predicted 41 min 38 s: {_SUM}"),
        ),
        (
            _time(),
            1800,
            _DEFAULT,
            True,
            (
                _TRAINS,
                f"time limit 30 min 0 s, by --time; predicted 41 min 38 s: {_SUM}",
                "--time may be too short by 11 min 38 s; the job is then started again and resumes",
            ),
        ),
        (
            _time(),
            1800,
            _DEFAULT,
            False,
            (
                _TRAINS,
                f"time limit 30 min 0 s, by --time; predicted 41 min 38 s: {_SUM}",
                "--time may be too short by 11 min 38 s; the job then ends: raise --time",
            ),
        ),
        (
            _time(_UNKNOWN),
            None,
            _DEFAULT,
            True,
            (
                "the number of steps is unknown: its data has no length, and it sets no max_steps; the "
                "cluster's default limit applies, and --time sets one",
            ),
        ),
        (
            _time(step_time_s=None),
            7200,
            _DEFAULT,
            True,
            (_TRAINS, "time limit 2 h 0 min, by --time; the time of a step is not predicted"),
        ),
    ],
)
def test_the_limit_is_said_with_what_it_follows_from(
    time: RunTime, said_s: int | None, default: str | None, restarts: bool, sentences: tuple[str, ...]
) -> None:
    assert time_sentences(time, said_s=said_s, default=default, restarts=restarts) == sentences
