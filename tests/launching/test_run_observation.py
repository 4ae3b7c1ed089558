"""A finished run's peak memory and step time are stored in this machine's observations."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from captured_scripts import VERSIONS, capture, captured_problem
from runs import SCRIPTS, Launch
from small_runs import observation

from zerofit.core.observer import Observer
from zerofit.core.plan import Plan
from zerofit.core.rank_observation import Phase, PhasePeak, RankObservation
from zerofit.core.strategy import Strategy
from zerofit.launching.diagnose import EndKind, RunEnd
from zerofit.launching.hang import RunWatch, closing_line, starting_line
from zerofit.launching.run_observation import store_observation
from zerofit.machine.observations import read_observations, subject_of


def test_steps_and_memory_of_a_finished_run(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    launch("--engine", "native", "--num-processes", "1", str(SCRIPTS / "paced.py")).check()
    (one,) = read_observations()
    assert (one.script, one.num_steps, one.is_out_of_memory, one.peaks) == (
        str(SCRIPTS / "paced.py"),
        64,
        False,
        (),
    )
    assert one.host_bytes > 2**26
    assert one.step_time_s == pytest.approx(0.1, rel=0.25)


@pytest.mark.parametrize(
    ("ranks", "duration_s", "predicted_bytes", "line"),
    [
        ((), 43.4, None, "ended well after 43 s"),
        ((observation(Phase.ENDED),), 600, 2**30, "ended well after 10 min 0 s; no optimizer step was seen"),
        (
            tuple(
                observation(
                    Phase.ENDED,
                    step=7,
                    num_steps=7,
                    peaks={Phase.BACKWARD: PhasePeak(allocated_bytes=size, reserved_bytes=2**40)},
                )
                for size in (2**30, 3 * 2**30)
            ),
            7260,
            2**32,
            "ended well after 2 h 1 min, step 7 of 7, tensors of at most 3.0 GiB on a GPU "
            "(4.0 GiB predicted)",
        ),
    ],
)
def test_closing_line(
    ranks: tuple[RankObservation, ...], duration_s: float, predicted_bytes: int | None, line: str
) -> None:
    assert closing_line(ranks, duration_s, predicted_bytes) == line


@pytest.mark.parametrize(
    ("found", "line"),
    [
        ({}, "ranks 0, 1: starting"),
        ({0: observation(Phase.LOADING)}, "rank 0: loading libraries, model and data; rank 1: starting"),
        (
            dict.fromkeys(range(2), observation(Phase.PREPARING)),
            "ranks 0, 1: preparing the model and the optimizer",
        ),
        (dict.fromkeys(range(2), observation(Phase.FORWARD)), "ranks 0, 1: forward of step 1"),
    ],
)
def test_what_ranks_do_before_the_first_step(found: dict[int, RankObservation], line: str) -> None:
    assert starting_line(found, range(2), 95) == f"no step after 1 min 35 s; {line}"


def test_many_ranks_that_start_are_counted() -> None:
    assert starting_line({}, range(8), 30) == "no step after 30 s; ranks 0, 1, 2, 3 and 4 more: starting"


class _Progress(Observer):
    def __init__(self) -> None:
        self.told: list[str] = []

    def progress(self, sentence: str) -> None:
        self.told.append(sentence)


@pytest.mark.parametrize(("waited_s", "told"), [(31, ["no step after 31 s; rank 0: starting"]), (29, [])])
def test_a_run_gives_a_sign_of_life_before_its_first_step(
    tmp_path: Path, waited_s: int, told: list[str]
) -> None:
    observer, began = _Progress(), time.monotonic() - waited_s
    watch = RunWatch(
        ranks_folder=tmp_path,
        ranks=range(1),
        limit_s=0,
        observer=observer,
        _looked_at=began,
        _began_at=began,
        _told_at=began,
    )
    watch.look()
    assert observer.told == told


def _rank(reserved_bytes: int, *, step: int) -> RankObservation:
    peaks = {Phase.BACKWARD: PhasePeak(allocated_bytes=10, reserved_bytes=reserved_bytes)}
    return observation(Phase.BACKWARD, step=step, host_bytes=7, peaks=peaks)


@pytest.mark.parametrize(
    ("kind", "step", "is_stored"),
    [
        (None, 5, True),
        (None, 0, False),
        (EndKind.GPU_OUT_OF_MEMORY, 0, True),
        (EndKind.SCRIPT_ERROR, 5, False),
        (EndKind.SIGNAL, 5, False),
    ],
)
def test_runs_that_are_stored(
    kind: EndKind | None, step: int, is_stored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    problem = captured_problem(capture(), num_gpus=2)
    plan = Plan(
        strategy=Strategy(),
        topology=problem.topology,
        machine=problem.machine,
        versions=VERSIONS,
        workload=problem.workload,
        capture=capture(),
    )
    end = RunEnd(exit_code=1 if kind else 0, cause=None, kind=kind, phase=Phase.FORWARD, peak_bytes=50)
    ranks = {0: _rank(20, step=step), 1: _rank(30, step=step)}
    store_observation(plan, ("train.py", "--token", "x"), end, ranks, peak_host_bytes=9, step_time_s=None)
    found = read_observations()
    assert len(found) == is_stored
    for one in found:
        assert (one.script, one.host_bytes, one.peak_reserved_bytes) == ("train.py", 9, 50 if kind else 30)
        assert one.is_out_of_memory is (kind is not None)
        assert one.expandable_segments
        assert one.subject == subject_of(plan.capture, plan.workload) != ""
