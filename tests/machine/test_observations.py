"""The store of what launched runs needed: whole, bounded, and read past a broken file."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from zerofit.core.facts import Versions
from zerofit.core.plan import Topology
from zerofit.core.rank_observation import Phase
from zerofit.core.strategy import Strategy
from zerofit.machine import observations
from zerofit.machine.observations import Observation, ObservedPeak, read_observations, write_observation

if TYPE_CHECKING:
    from pathlib import Path

_ONE = Observation(
    at="2026-11-20T10:00:00+00:00",
    script="train.py",
    subject="0123456789abcdef",
    strategy=Strategy(micro_batch_size=4),
    topology=Topology(),
    gpus=("NVIDIA A100-SXM4-80GB",),
    versions=Versions(python="3.11", zerofit="1", torch="2.9"),
    num_steps=12,
    is_out_of_memory=False,
    peaks=(ObservedPeak(phase=Phase.BACKWARD, allocated_bytes=20, reserved_bytes=30),),
    host_bytes=40,
    step_time_s=0.5,
    predicted_bytes=25,
)


def test_an_observation_is_read_as_it_was_written(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    later = replace(_ONE, at="2026-11-21T10:00:00+00:00", is_out_of_memory=True)
    for one in (later, _ONE):
        write_observation(one, environ=environ)
    assert read_observations(environ=environ) == (later, _ONE)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"at": 1}', b"[" * 100_000])
def test_a_broken_file_counts_as_none(content: bytes, tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    folder = write_observation(_ONE, environ=environ).parent
    (folder / "2026-11-22.json").write_bytes(content)
    assert read_observations(environ=environ) == (_ONE,)


def test_the_oldest_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observations, "MOST_OBSERVATIONS", 3)
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    for day in range(1, 6):
        write_observation(replace(_ONE, at=f"2026-11-0{day}T10:00:00+00:00"), environ=environ)
    assert [one.at[:10] for one in read_observations(environ=environ)] == [
        "2026-11-05",
        "2026-11-04",
        "2026-11-03",
    ]
