"""A process that waits with all imported until it is its turn."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from small_specs import place_in, spec_in

from zerofit.measuring.parent import start_rung
from zerofit.measuring.results import Outcome, RungState
from zerofit.measuring.run import STAGE
from zerofit.measuring.spec import spec_to_json

_MOST_S = 200.0


def _child(others: list[psutil.Process]) -> psutil.Process:
    (child,) = (one for one in psutil.Process().children() if one not in others)
    return child


def _wait_until_it_waits(log: Path) -> None:
    """Wait until a process says in its log that it waits."""
    until = time.monotonic() + _MOST_S
    while time.monotonic() < until:
        if f"{STAGE}waiting for its turn\n" in log.read_text():
            return
        time.sleep(0.05)
    raise AssertionError("it never waited")


@pytest.mark.slow
def test_several_wait_until_told_to_go_one_after_another(tmp_path: Path) -> None:
    others = psutil.Process().children()
    names = ("one", "two")
    rungs = [start_rung(spec_in(tmp_path, waits=True, name=name), place_in(tmp_path, name)) for name in names]
    for name in names:
        _wait_until_it_waits(place_in(tmp_path, name).log)
    first = rungs[0].finish(limit_s=_MOST_S)
    assert not place_in(tmp_path, "two").result.exists()
    second = rungs[1].finish(limit_s=_MOST_S)
    assert [first.state, second.state] == [RungState.DONE] * 2, (first, second)
    assert first.measured is not None
    assert second.measured is not None
    assert first.measured.losses == second.measured.losses
    assert psutil.Process().children() == others


@pytest.mark.slow
def test_what_is_over_its_time_was_running_not_waiting(tmp_path: Path) -> None:
    with start_rung(spec_in(tmp_path, waits=True, num_steps=10**6), place_in(tmp_path)) as rung:
        _wait_until_it_waits(place_in(tmp_path).log)
        outcome = rung.finish(limit_s=2)
    assert outcome.state is RungState.TOO_SLOW
    assert outcome.reason.startswith("not done after 2 s, while ")
    assert "importing" not in outcome.reason
    assert "waiting" not in outcome.reason


def test_one_that_is_ended_unrun_leaves_no_result_and_no_process(tmp_path: Path) -> None:
    others = psutil.Process().children()
    place = place_in(tmp_path)
    rung = start_rung(spec_in(tmp_path, waits=True), place)
    rung.end()
    rung.end()  # as often as one likes
    assert not place.result.exists()
    assert psutil.Process().children() == others


@pytest.mark.slow
def test_a_closed_standard_input_ends_it_quietly(tmp_path: Path) -> None:
    spec, place = spec_in(tmp_path, waits=True), place_in(tmp_path)
    place.spec.write_text(spec_to_json(spec))
    ended = subprocess.run(
        [sys.executable, "-m", "zerofit.measuring.run", str(place.spec), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert (ended.returncode, ended.stdout) == (0, b"")
    assert not place.result.exists()


def test_one_that_fails_before_its_turn_says_why_at_its_turn(tmp_path: Path) -> None:
    others = psutil.Process().children()
    spec = spec_in(tmp_path, waits=True, task="no-such-task")
    with start_rung(spec, place_in(tmp_path)) as rung:
        psutil.wait_procs([_child(others)], timeout=1)
        outcome = rung.finish(limit_s=_MOST_S)
    assert outcome == Outcome(state=RungState.FAILED, reason="ValueError: 'no-such-task' is not a valid Task")


def test_a_killed_one_that_waits_says_so(tmp_path: Path) -> None:
    others = psutil.Process().children()
    with start_rung(spec_in(tmp_path, waits=True), place_in(tmp_path)) as rung:
        _child(others).kill()
        outcome = rung.finish(limit_s=_MOST_S)
    assert outcome.state is RungState.KILLED
    assert outcome.reason.startswith("ended by SIGKILL, while importing")


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "from small_specs import place_in, spec_in; from zerofit.measuring.parent import start_rung\n"
        "folder = Path(sys.argv[1]); rung = start_rung(spec_in(folder, waits=True), place_in(folder))\n"
        "print('started', flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), str(Path(__file__).parents[1] / "support")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "started\n"
    children = psutil.Process(parent.pid).children()
    _wait_until_it_waits(place_in(tmp_path).log)
    parent.kill()
    parent.wait()
    assert psutil.wait_procs(children, timeout=30)[1] == []
    parent.stdout.close()
