"""`zerofit runs` of a run of this machine: how it stands, what it prints, and its end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from running_launches import TRAIN, RunningLaunch, assert_all_gone
from runs import environment, run_command

from zerofit.launching.clusters.follow import find_run

_ZEROFIT = (sys.executable, "-m", "zerofit")


def test_a_run_of_this_machine_is_seen_followed_and_cancelled(tmp_path: Path) -> None:
    command = (*_ZEROFIT, "launch", "--cpu", "--num-processes", "1", "--engine", "native", TRAIN, "5000")
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    launch = RunningLaunch(process=process, folder=tmp_path)
    launch.wait_for_step(2, ranks=1)

    status = run_command((*_ZEROFIT, "runs", "status"), tmp_path).check().stdout
    assert f"run:    zerofit-runs/{launch.run_folder.name}" in status
    assert "end:    it runs" in status
    cancelled = run_command((*_ZEROFIT, "runs", "cancel", launch.run_folder.name), tmp_path).check()
    assert cancelled.stderr == f"zerofit: process {process.pid}, which runs it, was told to end\n"
    assert launch.end()[0] == 128 + 15
    status = run_command((*_ZEROFIT, "runs", "status", launch.run_folder.name), tmp_path).check().stdout
    assert "exit code 143: stopped by SIGTERM" in status
    document = json.loads(run_command((*_ZEROFIT, "runs", "status", "--json"), tmp_path).check().stdout)
    assert document["exit_code"] == 143
    assert not document["is_running"]
    assert f"end:    {document['end']}\n" in status
    log = launch.run_folder / "logs" / "rank0.log"
    log.write_text("loss 1.0\n")
    logs = run_command((*_ZEROFIT, "runs", "logs", "-f", launch.run_folder.name), tmp_path).check()
    assert (logs.stdout, logs.stderr) == ("loss 1.0\n", f"zerofit: the run ended: {document['end']}\n")
    again = run_command((*_ZEROFIT, "runs", "cancel", launch.run_folder.name), tmp_path)
    assert again.exit_code == 1
    assert "error[run-not-running]: the run is not running here" in again.stderr


def test_a_killed_zerofit_is_seen_by_every_verb(tmp_path: Path) -> None:
    command = (*_ZEROFIT, "launch", "--cpu", "--num-processes", "1", "--engine", "native", TRAIN, "5000")
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    launch = RunningLaunch(process=process, folder=tmp_path)
    launch.wait_for_step(2, ranks=1)
    below, name = launch.below(), launch.run_folder.name
    assert "running" in run_command((*_ZEROFIT, "runs", "list"), tmp_path).check().stdout
    process.kill()
    launch.end()
    assert_all_gone(below)

    killed = f"zerofit itself, process {process.pid}, ended without a record: it was killed"
    assert f"no record  {name}\n" in run_command((*_ZEROFIT, "runs", "list"), tmp_path).check().stdout
    status = run_command((*_ZEROFIT, "runs", "status"), tmp_path).check().stdout
    assert status.endswith(f"end:    {killed}\n")
    cancel = run_command((*_ZEROFIT, "runs", "cancel", name), tmp_path)
    assert cancel.exit_code == 1
    assert f"why:   {killed}\n" in cancel.stderr
    (launch.run_folder / "logs" / "rank0.log").write_text("")
    logs = run_command((*_ZEROFIT, "runs", "logs", "-f", name), tmp_path)
    assert "error[log-missing]: the run has printed nothing\n" in logs.stderr
    assert f"why:   it ended: {killed}\n" in logs.stderr
    explained = run_command((*_ZEROFIT, "explain", str(launch.run_folder)), tmp_path).check().stdout
    assert explained == f"no log has the reason: {killed}\n"
    pruned = run_command((*_ZEROFIT, "runs", "prune", "--keep-last", "0"), tmp_path).check()
    assert "removed 1 runs" in pruned.stderr
    assert list((tmp_path / "zerofit-runs").glob("2*")) == []


def test_a_run_that_is_not_there_is_named_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "zerofit-runs" / "2026-01-01_00-00-00-train").mkdir(parents=True)
    done = run_command((*_ZEROFIT, "runs", "status", "2026-01-01_00-00-00-trian"), tmp_path)
    assert done.exit_code == 2
    assert "error[run-missing]: there is no such run" in done.stderr
    assert "did you mean 2026-01-01_00-00-00-train?" in done.stderr


def test_the_newest_run_is_no_folder_of_trials(tmp_path: Path) -> None:
    for name in ("2026-01-01_00-00-00-train", "tune-train-0f0f0f0f"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan.json").touch()
    assert find_run(None, tmp_path).folder.name == "2026-01-01_00-00-00-train"
