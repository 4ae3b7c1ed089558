"""The live file of a rank: read from outside as it was written, whatever happened to its writer."""

from __future__ import annotations

from pathlib import Path

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
    live.write(Phase.LOADING, (7, 0, 0, 61, 500, 0, 0), (1.0, 0.0))
    live.write_peak(Phase.BACKWARD, _PEAK)
    live.write_checkpoint("/a/checkpöint")
    live.write(Phase.SAVING, (7, 12, 100, 61, 500, 2**33, 10), (1.5, 0.25))
    assert read_observation(tmp_path / "ranks", 3) == RankObservation(
        pid=7,
        phase=Phase.SAVING,
        step=12,
        num_steps=100,
        changed_at=1.5,
        longest_phase_s=0.25,
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
    live.write(Phase.FORWARD, (7, 1, 0, 61, 500, 0, 0), (1.0, 0.0))
    whole = live_file(tmp_path, 0).read_bytes()
    for damaged in (b"", whole[:50], b"\xff" + whole[1:]):
        live_file(tmp_path, 0).write_bytes(damaged)
        assert read_observation(tmp_path, 0) is None
