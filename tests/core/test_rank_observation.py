"""The live file of a rank: read from outside as it was written, whatever happened to its writer."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import observation

from zerofit.core.rank_observation import (
    LiveFile,
    Phase,
    PhasePeak,
    RankObservation,
    live_file,
    read_observation,
)

_PEAK = PhasePeak(allocated_bytes=2**40, reserved_bytes=2**41)


def test_an_observation_reads_back_as_written(tmp_path: Path) -> None:
    live = LiveFile(tmp_path / "ranks", 3)
    assert read_observation(tmp_path / "ranks", 3) is None  # nothing is said yet
    live.write(Phase.LOADING, (7, 0, 0, 61, 500, 0, 0, 0), (1.0, 0.0, 0.0))
    live.write_peak(Phase.BACKWARD, _PEAK)
    live.write_checkpoint("/a/checkpöint")
    live.write(Phase.SAVING, (7, 12, 100, 61, 500, 2**33, 10, 3), (1.5, 0.25, 0.5))
    assert read_observation(tmp_path / "ranks", 3) == RankObservation(
        pid=7,
        phase=Phase.SAVING,
        step=12,
        num_steps=100,
        changed_at=1.5,
        longest_phase_s=0.25,
        first_step=3,
        first_step_at=0.5,
        dump_signal=61,
        dump_descriptor=500,
        host_bytes=2**33,
        checkpoint_step=10,
        checkpoint="/a/checkpöint",
        peaks={Phase.BACKWARD: _PEAK},
    )


def test_a_file_that_is_missing_short_or_half_written_says_nothing(tmp_path: Path) -> None:
    assert read_observation(tmp_path, 0) is None
    live = LiveFile(tmp_path, 0)
    live.write(Phase.FORWARD, (7, 1, 0, 61, 500, 0, 0, 0), (1.0, 0.0, 0.0))
    whole = live_file(tmp_path, 0).read_bytes()
    for damaged in (b"", whole[:50], b"\xff" + whole[1:]):
        live_file(tmp_path, 0).write_bytes(damaged)
        assert read_observation(tmp_path, 0) is None


@pytest.mark.parametrize(
    ("first", "step", "s_per_step"),
    [
        ((0, 0.0), 0, None),
        ((1, 10.0), 1, None),  # the first has the compilation and the warm-up
        ((1, 10.0), 3, 5.0),
        ((501, 10.0), 511, 1.0),  # resumed
        ((1, 20.0), 3, None),
    ],
)
def test_the_pace_is_of_the_steps_after_the_first(
    first: tuple[int, float], step: int, s_per_step: float | None
) -> None:
    number, at = first
    rank = observation(Phase.FORWARD, first_step=number, first_step_at=at, step=step, changed_at=20.0)
    assert rank.s_per_step == s_per_step
