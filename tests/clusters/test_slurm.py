"""Runs on a real Slurm of two nodes: submitted, followed, cancelled, and started again after a time limit."""

from __future__ import annotations

import json
import re
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import run_command
from slurm_cluster import SlurmCluster, lacks

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(bool(lacks()), reason=str(lacks()))]

_SCRIPTS = Path(__file__).parent / "scripts"
_ZEROFIT = (sys.executable, "-m", "zerofit")
_NODES = ["--num-machines", "2", "--gpus", "1xA100-80G", "--cpu-cores", "1", "--cpu", "--zero-stage", "2"]
_MISLEADING = [
    *("--scheduler-option", "job-name=x JobState=COMPLETED Reason=None"),
    *("--scheduler-option", "comment=JobState=FAILED Reason=None"),
]
_STEPS, _STEP_S = 110, 0.8
"""Longer than the nodes are lent for, of which some 40 s go by before the first step."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, built_ops: None) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), cores=2, memory_mib=16000) as running:
        yield running


def _submit(cluster: SlurmCluster, place: Path, *words: str) -> tuple[str, Path]:
    """Submit a script of this folder and return the job's number and its run folder."""
    place.mkdir(exist_ok=True)
    script = next(word for word in words if word.endswith(".py"))
    shutil.copy(_SCRIPTS / script, place)
    done = cluster.run(
        *_ZEROFIT, "submit", "--on", "slurm", *_NODES, *words, folder=place, WANDB_API_KEY="not-for-files"
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (place / "zerofit-runs").glob("2*")
    return done.stdout.strip(), folder


def _losses(place: Path) -> list[tuple[int, float, float]]:
    """Return step, loss and learning rate; of a step that was done again the last."""
    lines = [json.loads(line) for line in (place / "losses.jsonl").read_text().splitlines()]
    return sorted((int(step), loss, rate) for step, loss, rate in {line[0]: line for line in lines}.values())


def test_a_run_is_started_again_after_its_time_limit_and_trains_as_one(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    steps = (str(_STEPS), str(_STEP_S))
    limits = ["--time", "3", "--save-time", "80", "--max-requeues", "3"]
    runs = {
        script: _submit(cluster, tmp_path / script, *limits, f"{script}.py", *steps)
        for script in ("loop", "trainer")
    }
    for script, (job_id, folder) in runs.items():
        state = cluster.wait_for(job_id, "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", within_s=850)
        # two nodes may write at once, and cut a character of a progress bar in two
        output = (folder / f"slurm-{job_id}.out").read_text(errors="replace")
        assert state == "COMPLETED", output
        first = json.loads((folder / "run.json").read_text())
        assert (first["kind"], first["exit_code"]) == ("stopped", 75)
        assert "start 1 of at most 3 after the first: resumes from" in output
        last = max(folder.glob("requeue-*"))  # a busy machine may need more than one
        record = json.loads((last / "run.json").read_text())
        assert (record["kind"], record["exit_code"]) == (None, 0)
        plain = tmp_path / f"{script}-plain"
        plain.mkdir()
        command = (*_ZEROFIT, *["launch", "--cpu", "--num-processes", "2", "--zero-stage", "2"])
        run_command((*command, str(_SCRIPTS / f"{script}.py"), str(_STEPS), "0"), plain).check()
        assert _losses(tmp_path / script) == _losses(plain)
        assert len(_losses(plain)) == _STEPS


def test_a_run_asks_for_what_its_plan_needs_and_writes_no_secret(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    job_id, folder = _submit(
        cluster, tmp_path / "asks", "--time", "2", "--save-time", "30", "loop.py", "1", "0"
    )
    shown = cluster.run("scontrol", "--oneliner", "show", "job", job_id).stdout
    assert "NumNodes=2" in shown
    assert "NumCPUs=2" in shown
    assert "TimeLimit=00:02:00" in shown
    assert "Requeue=1" in shown
    memory = re.search(r"MinMemoryNode=(\d+)G", shown)
    assert memory is not None
    assert 1 <= int(memory[1]) <= 8
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for file in (folder / "job.sbatch", folder / "job.json", folder / "plan.json", folder / "submitted.json"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert "not-for-files" not in file.read_text()
    cluster.run("scancel", job_id)
    cluster.wait_for(job_id, "CANCELLED", "COMPLETED", within_s=60)


def test_a_run_is_followed_and_cancelled(cluster: SlurmCluster, tmp_path: Path) -> None:
    job_id, folder = _submit(
        cluster, tmp_path / "runs", *_MISLEADING, "--time", "5", "--save-time", "60", "loop.py", "5000", "0.2"
    )
    cluster.wait_for(job_id, "RUNNING", within_s=60)

    def runs(*words: str) -> str:
        done = cluster.run(*_ZEROFIT, "runs", *words, folder=folder.parents[1])
        assert done.returncode == 0, done.stderr
        return done.stdout

    until = time.monotonic() + 120
    while not re.search(r"ranks:  2, step [1-9]", status := runs("status")):
        assert time.monotonic() < until, status
        time.sleep(2)
    assert f"job:    {job_id} on slurm, RUNNING" in status
    assert "begins at step 0" in runs("logs", folder.name)
    runs("cancel", folder.name)
    assert cluster.wait_for(job_id, "CANCELLED", within_s=60) == "CANCELLED"
    assert "2 nodes have met" in runs("logs", "-f")  # which ends, as the job has
    assert f"job:    {job_id} on slurm, CANCELLED" in runs("status")


def test_what_slurm_refuses_is_told_and_leaves_nothing(cluster: SlurmCluster, tmp_path: Path) -> None:
    shutil.copy(_SCRIPTS / "loop.py", tmp_path)
    command = ("submit", "--on", "slurm", *_NODES, "--partition", "none", "loop.py", "1", "0")
    done = cluster.run(*_ZEROFIT, *command, folder=tmp_path)
    assert done.returncode == 1
    assert "error[scheduler-refused]: sbatch refused the request" in done.stderr
    assert "invalid partition" in done.stderr.lower()
    assert list((tmp_path / "zerofit-runs").glob("2*")) == []
