"""`zerofit runs` of a run of this machine: how it stands, what it prints, and its end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from running_launches import TRAIN, RunningLaunch, assert_all_gone
from runs import RunZerofit, environment

from zerofit.launching.clusters.follow import find_run


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[RunningLaunch]:
    """Return a launch that trains until it is ended: `zerofit runs` reads the arguments of its processes."""
    flags = ("--cpu", "--num-processes", "1", "--engine", "native")
    process = subprocess.Popen(
        (sys.executable, "-m", "zerofit", "launch", *flags, TRAIN, "5000"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    launch = RunningLaunch(process=process, folder=tmp_path)
    launch.wait_for_step(2, ranks=1)
    yield launch
    process.terminate()


@pytest.fixture
def runs(run_zerofit: RunZerofit, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs `zerofit runs`, which must end with a code."""

    def run(*words: str, exit_code: int = 0) -> subprocess.CompletedProcess[str]:
        done = run_zerofit("runs", *words, cwd=tmp_path)
        assert done.returncode == exit_code, done.stderr
        return done

    return run


@pytest.mark.slow
def test_a_run_of_this_machine_is_seen_followed_and_cancelled(
    launch: RunningLaunch, runs: RunZerofit
) -> None:
    name = launch.run_folder.name
    status = runs("status").stdout
    assert f"run:    zerofit-runs/{name}" in status
    assert "end:    it runs" in status
    cancelled = runs("cancel", name)
    assert cancelled.stderr == f"zerofit: process {launch.process.pid}, which runs it, was told to end\n"
    assert launch.end()[0] == 128 + 15
    status = runs("status", name).stdout
    assert "exit code 143: stopped by SIGTERM" in status
    document = json.loads(runs("status", "--json").stdout)
    assert document["exit_code"] == 143
    assert not document["is_running"]
    assert f"end:    {document['end']}\n" in status
    log = launch.run_folder / "logs" / "rank0.log"
    log.write_text("loss 1.0\n")
    logs = runs("logs", "-f", name)
    assert (logs.stdout, logs.stderr) == ("loss 1.0\n", f"zerofit: the run ended: {document['end']}\n")
    again = runs("cancel", name, exit_code=1)
    assert "error[run-not-running]: the run is not running here" in again.stderr


@pytest.mark.slow
def test_a_killed_zerofit_is_seen_by_every_verb(
    launch: RunningLaunch, runs: RunZerofit, run_zerofit: RunZerofit, tmp_path: Path
) -> None:
    below, name = launch.below(), launch.run_folder.name
    assert "running" in runs("list").stdout
    launch.process.kill()
    _, said = launch.end()
    assert_all_gone(below)
    assert "BrokenPipeError" not in said  # of the process that wanted to report to it

    killed = f"zerofit itself, process {launch.process.pid}, ended without a record: it was killed"
    assert f"no record  {name}\n" in runs("list").stdout
    status = runs("status").stdout
    assert status.endswith(f"end:    {killed}\n")
    cancel = runs("cancel", name, exit_code=1)
    assert f"why:   {killed}\n" in cancel.stderr
    (launch.run_folder / "logs" / "rank0.log").write_text("")
    logs = runs("logs", "-f", name, exit_code=2)
    assert "error[log-missing]: the run has printed nothing\n" in logs.stderr
    assert f"why:   it ended: {killed}\n" in logs.stderr
    explained = run_zerofit("explain", str(launch.run_folder), cwd=tmp_path)
    reason, following = explained.stdout.splitlines()
    assert (explained.returncode, reason) == (0, f"no log has the reason: {killed}")
    plan = launch.run_folder / "plan.json"
    assert following.startswith(f"next:   zerofit launch --plan {plan} ")
    pruned = runs("prune", "--keep-last", "0")
    assert "removed 1 runs" in pruned.stderr
    assert list((tmp_path / "zerofit-runs").glob("2*")) == []


def test_a_run_that_is_not_there_is_named_with_the_nearest(runs: RunZerofit, tmp_path: Path) -> None:
    (tmp_path / "zerofit-runs" / "2026-01-01_00-00-00-train").mkdir(parents=True)
    done = runs("status", "2026-01-01_00-00-00-trian", exit_code=2)
    assert "error[run-missing]: there is no such run" in done.stderr
    assert "did you mean 2026-01-01_00-00-00-train?" in done.stderr


@pytest.mark.parametrize("verb", ["status", "show", "report"])
def test_where_no_run_is_the_fix_names_where_runs_are(runs: RunZerofit, tmp_path: Path, verb: str) -> None:
    assert runs(verb, exit_code=2).stderr == (
        "error[run-missing]: there is no such run\n"
        "  found: no run in zerofit-runs\n"
        f"  why:   no run folder in {tmp_path / 'zerofit-runs'}\n"
        "  fix:   go to the folder where it was launched, or name the runs' folder with --run-dir\n"
    )


def test_the_newest_run_is_no_folder_of_trials(tmp_path: Path) -> None:
    for name in ("2026-01-01_00-00-00-train", "tune-train-0f0f0f0f"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan.json").touch()
    assert find_run(None, tmp_path).folder.name == "2026-01-01_00-00-00-train"
