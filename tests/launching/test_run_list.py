"""`zerofit runs list` and `prune`: which runs are removed, and which never are."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from clients import path_with
from runs import Run, run_command

from zerofit.launching import run_list
from zerofit.launching.run_list import list_runs, remove_run

_OK, _FAILED, _KILLED = "2026-01-01_00-00-00-ok", "2026-01-02_00-00-00-failed", "2026-01-03_00-00-00-killed"
_CHECKPOINT, _NEW, _AGAIN = (
    "2026-01-04_00-00-00-saved",
    "2999-01-01_00-00-00-new",
    "2026-01-05_00-00-00-again",
)


def _runs(folder: Path, *arguments: str) -> Run:
    return run_command((sys.executable, "-m", "zerofit", "runs", *arguments), folder)


def _make(folder: Path, name: str, exit_code: int | None, *more: str) -> None:
    run = folder / "zerofit-runs" / name
    for file in ("plan.json", "logs/rank0.log", *more):
        (run / file).parent.mkdir(parents=True, exist_ok=True)
        (run / file).write_text("x" * 5000)
    if exit_code is not None:
        (run / "run.json").write_text(json.dumps({"exit_code": exit_code}))
    long_ago = time.time() - 86400
    for path in (run, *run.rglob("*")):
        os.utime(path, (long_ago, long_ago))


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Runs of each kind, and a folder that is no run."""
    _make(tmp_path, _OK, 0)
    _make(tmp_path, _FAILED, 1)
    _make(tmp_path, _KILLED, None)
    _make(tmp_path, _CHECKPOINT, 0, "checkpoints/step_3/model.safetensors")
    _make(tmp_path, _AGAIN, 1, "recovery-1/plan.json", "recovery-1/mine.txt")
    _make(tmp_path, _NEW, 0)
    (tmp_path / "zerofit-runs" / "my-results").mkdir()
    return tmp_path


def _names(folder: Path) -> set[str]:
    return {entry.name for entry in (folder / "zerofit-runs").iterdir()}


def test_runs_are_listed_with_their_size_and_state(kept: Path) -> None:
    header, *listed = _runs(kept, "list").check().stdout.splitlines()
    assert header == "      size  state      run"
    assert [line.split()[2:] for line in listed] == [
        ["exit", "0", _OK],
        ["exit", "1", _FAILED],
        ["no", "record", _KILLED],
        ["exit", "0", _CHECKPOINT],
        ["no", "record", _AGAIN],
        ["exit", "0", _NEW],
    ]
    assert listed[0].startswith("   9.8 KiB  exit 0 ")
    document = json.loads(_runs(kept, "list", "--json").check().stdout)
    assert [Path(one["folder"]).name for one in document] == [line.split()[-1] for line in listed]
    assert document[1] == {
        "folder": str(kept / "zerofit-runs" / _FAILED),
        "started_at": "2026-01-02T00:00:00+00:00",
        "num_bytes": 10_016,
        "state": "exit 1",
        "exit_code": 1,
    }


@pytest.mark.parametrize(
    ("arguments", "removed"),
    [
        pytest.param(("--older-than", "30"), {_OK, _FAILED, _KILLED}, marks=pytest.mark.slow),
        (("--older-than", "30", "--keep-failed"), {_OK}),
        pytest.param(("--keep-last", "0"), {_OK, _FAILED, _KILLED, _NEW}, marks=pytest.mark.slow),
        (("--keep-last", "5"), {_OK}),
        pytest.param(("--keep-last", "50"), set(), marks=pytest.mark.slow),
        (("--keep-last", "0", "--older-than", "30"), {_OK, _FAILED, _KILLED}),
    ],
)
def test_only_runs_past_all_limits_are_removed(
    kept: Path, arguments: tuple[str, ...], removed: set[str]
) -> None:
    before = _names(kept)
    would = _runs(kept, "prune", "--dry-run", *arguments).check()
    assert _names(kept) == before
    done = _runs(kept, "prune", *arguments).check()
    assert before - _names(kept) == removed
    assert (
        done.stdout == would.stdout == "".join(f"{kept / 'zerofit-runs' / one}\n" for one in sorted(removed))
    )
    assert would.stderr.replace("would remove", "removed") == done.stderr
    assert f"zerofit: removed {len(removed)} runs, " in done.stderr
    if _OK in removed and "5" not in arguments:
        assert f"zerofit: kept {_CHECKPOINT}: it contains checkpoints\n" in done.stderr
        assert f"zerofit: kept {_AGAIN}: it contains recovery-1/mine.txt\n" in done.stderr


def test_a_running_run_is_kept(kept: Path) -> None:
    plan = kept / "zerofit-runs" / _KILLED / "plan.json"
    rank = subprocess.Popen([sys.executable, "-c", "input()", str(plan)], stdin=subprocess.PIPE)
    try:
        done = _runs(kept, "prune", "--older-than", "1").check()
        assert f"zerofit: kept {_KILLED}: it runs, or may run elsewhere; " in done.stderr
        assert _KILLED in _names(kept)
    finally:
        rank.communicate(b"\n")


def test_a_submitted_run_that_has_not_started_is_kept(kept: Path) -> None:
    _make(kept, "2026-01-06_00-00-00-queued", None, "job.json", "submitted.json")
    _runs(kept, "prune", "--keep-last", "0").check()
    assert "2026-01-06_00-00-00-queued" in _names(kept)


_JOB = "2026-01-06_00-00-00-job"
_PRUNE = (sys.executable, "-m", "zerofit", "runs", "prune", "--keep-last", "0")


def _make_job(kept: Path, *files: str) -> Path:
    """Make the folder of a run that Slurm has as job 7."""
    _make(kept, _JOB, None, *files)
    folder = kept / "zerofit-runs" / _JOB
    (folder / "submitted.json").write_text(json.dumps({"engine": "slurm", "job_id": "7", "namespace": None}))
    return folder


def _slurm_says(folder: Path, script: str) -> str:
    """Return a PATH with a squeue and a scancel that answer so."""
    return path_with(folder, "squeue", "scancel", script=script)


@pytest.mark.parametrize(
    ("says", "state", "end"),
    [
        pytest.param("echo 7 PENDING BeginTime", "running", None, marks=pytest.mark.slow),
        ("echo 7 FAILED NonZeroExitCode", "no record", "its job is FAILED (NonZeroExitCode)"),
        pytest.param(
            "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1",
            "no record",
            "its job is no longer known to the scheduler",
            marks=pytest.mark.slow,
        ),
        (
            "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1",
            "running",
            "error[scheduler-unreachable]",
        ),
    ],
)
def test_the_scheduler_is_asked_about_a_job_without_a_record(
    kept: Path, says: str, state: str, end: str | None
) -> None:
    (_make_job(kept) / "slurm-7.out").write_text("loss 1.0\n")
    path = _slurm_says(kept, says)
    status = run_command((sys.executable, "-m", "zerofit", "runs", "status", _JOB), kept, PATH=path)
    if end is None:
        assert "end: " not in status.stdout
    elif state == "running":
        assert status.stderr.startswith(end)
    else:
        assert status.stdout.endswith(f"end:    unknown: {end}\n")
        follow = (sys.executable, "-m", "zerofit", "runs", "logs", "-f", _JOB)
        logs = run_command(follow, kept, PATH=path).check()
        assert (logs.stdout, logs.stderr) == ("loss 1.0\n", f"zerofit: the run ended: unknown: {end}\n")
    listed = run_command((sys.executable, "-m", "zerofit", "runs", "list"), kept, PATH=path).check().stdout
    (line,) = (line for line in listed.splitlines() if _JOB in line)
    assert f" {state} " in line
    run_command(_PRUNE, kept, PATH=path).check()
    assert (_JOB in _names(kept)) == (state == "running")


@pytest.mark.parametrize(
    ("says", "num_asked"),
    [
        ("echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1", 1),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", 3),
        ("for id in 1 2 3; do echo $id PENDING Priority; done", 3),
    ],
)
def test_a_scheduler_out_of_reach_is_asked_once(
    tmp_path: Path, says: str, num_asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        name = f"2026-01-07_00-00-0{number}-job"
        _make(tmp_path, name, None)
        job = {"engine": "slurm", "job_id": str(number + 1), "namespace": None}
        (tmp_path / "zerofit-runs" / name / "submitted.json").write_text(json.dumps(job))
    path = path_with(tmp_path, "squeue", script=f"echo $* >>{tmp_path}/asked\n{says}")
    monkeypatch.setenv("PATH", path)
    states = [run.state for run in list_runs(tmp_path / "zerofit-runs")]
    assert states == ["no record" if "Invalid" in says else "running"] * 3
    assert len((tmp_path / "asked").read_text().splitlines()) == num_asked


def test_a_job_unknown_to_the_scheduler_counts_as_ended(kept: Path) -> None:
    _make_job(kept)
    says = "echo 'scancel: error: Kill job error on job id 7: Invalid job id specified' >&2; exit 1"
    cancel = (sys.executable, "-m", "zerofit", "runs", "cancel", _JOB)
    run = run_command(cancel, kept, PATH=_slurm_says(kept, says))
    assert run.exit_code == 1
    assert "error[run-not-running]: the run is not running here" in run.stderr
    assert "why:   slurm job 7 is no longer known to the scheduler" in run.stderr


def test_a_stopped_run_is_removed_once_it_will_not_be_requeued(kept: Path) -> None:
    folder = _make_job(kept, "stop")
    (folder / "run.json").write_text(json.dumps({"exit_code": 75, "kind": "stopped"}))
    path = _slurm_says(kept, f"cat {kept}/says")
    (kept / "says").write_text("7 PENDING BeginTime")
    run_command(_PRUNE, kept, PATH=path).check()
    assert _JOB in _names(kept)
    (kept / "says").write_text("7 FAILED NonZeroExitCode")
    run_command(_PRUNE, kept, PATH=path).check()
    assert _JOB not in _names(kept)


def test_a_run_without_a_record_but_with_new_files_is_kept(kept: Path) -> None:
    (kept / "zerofit-runs" / _KILLED / "logs" / "rank0.log").write_text("of another node")
    assert f"unknown    {_KILLED}\n" in _runs(kept, "list").check().stdout
    status = _runs(kept, "status", _KILLED).check().stdout
    assert status.endswith("end:    unknown: its launcher left no record\n")
    _runs(kept, "prune", "--keep-last", "0").check()
    assert _KILLED in _names(kept)


def test_prune_without_a_limit_is_refused(kept: Path) -> None:
    done = _runs(kept, "prune")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "without a limit all runs would be removed: use --older-than DAYS" in done.stderr
    assert len(_names(kept)) == 7


def test_a_run_that_is_removed_meanwhile_is_not_listed(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = run_list.attempts

    def after_its_removal(folder: Path) -> tuple[Path, ...]:
        if folder.name == _FAILED:
            shutil.rmtree(folder)
        return attempts(folder)

    monkeypatch.setattr(run_list, "attempts", after_its_removal)
    listed = {run.folder.name for run in list_runs(kept / "zerofit-runs")}
    assert listed == _names(kept) - {_FAILED, "my-results"}


def test_two_may_remove_a_run_at_once(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def remove() -> None:
        try:
            remove_run(run)
        except BaseException as error:
            errors.append(error)

    for _ in range(5):
        _make(tmp_path, _OK, 0, *(f"logs/{number}.log" for number in range(100)))
        (run,) = list_runs(tmp_path / "zerofit-runs")
        threads = [threading.Thread(target=remove) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert _names(tmp_path) == set()
