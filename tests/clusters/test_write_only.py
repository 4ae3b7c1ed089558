"""`zerofit submit --write-only`: a run folder that lacks nothing, and what `zerofit runs` says of it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
import yaml
from clients import path_with
from runs import environment
from zerofit_in_process import run_in_process

from zerofit.core.plan import plan_from_json
from zerofit.launching.clusters.job import Job, job_from_json

_SCRIPTS = Path(__file__).parent / "scripts"
_MODEL = ("--model", "gpt2", "--sequence-length", "64", "--global-batch-size", "64", "--fast")
_KINDS = {
    "slurm": ("--on", "slurm", "--time", "90"),
    "TrainJob": ("--on", "kubernetes", "--image", "i:1"),
    "JobSet": ("--on", "kubernetes", "--image", "i:1", "--job-set"),
    "skypilot": ("--on", "skypilot", "--env", "HF_TOKEN"),
}
_CLIENTS = {"slurm": "sbatch", "TrainJob": "kubectl", "JobSet": "kubectl", "skypilot": "sky"}


def _write(place: Path, kind: str, *more: str) -> tuple[Path, dict[str, object]]:
    """Write a job where no client is installed; return its folder and what was printed."""
    shutil.copy(_SCRIPTS / "loop.py", place)
    nodes = ("--num-machines", "2", "--gpus", "8xH100")
    words = ("--json", "--write-only", *nodes, *_MODEL, *_KINDS[kind], *more)
    there = {"PATH": "/nowhere", "HF_TOKEN": "hf_not_for_files"}
    done = run_in_process(("submit", *words, "loop.py", "8", "0"), cwd=place, environment=there)
    assert done.returncode == 0, done.stderr
    (folder,) = (place / "zerofit-runs").glob("2*")
    return folder, json.loads(done.stdout)


@pytest.mark.parametrize("kind", _KINDS)
def test_the_folder_has_every_file_that_its_job_reads(same_folder: Path, kind: str) -> None:
    folder, document = _write(same_folder, kind)
    assert (document["is_written"], document["job_id"]) == (True, None)
    job: Job = job_from_json((folder / "job.json").read_text(), name="job.json")
    plan = plan_from_json((folder / "plan.json").read_text(), name="plan.json")
    assert (job.num_nodes, plan.topology.num_nodes, plan.topology.world_size) == (2, 2, 16)
    # every file of the folder that a command or a job names is there
    texts = [str(document["command"]), *(path.read_text() for path in folder.glob("job.*"))]
    words = {word.strip("'\"") for text in texts for line in text.split() for word in line.split("=")}
    named = {Path(word) for word in words if word.startswith(f"{folder}/") and Path(word).suffix}
    later = {folder / "slurm-%j.out"}
    assert [path for path in named - later if not path.is_file()] == []
    assert not any("not_for_files" in path.read_text() for path in folder.iterdir())
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in folder.iterdir())


@pytest.mark.parametrize("kind", _KINDS)
def test_its_command_and_its_script_hand_the_job_to_the_client(same_folder: Path, kind: str) -> None:
    folder, document = _write(same_folder, kind)
    path = path_with(
        same_folder, _CLIENTS[kind], script=f'pwd >>{same_folder}/calls; echo "$@" >>{same_folder}/calls'
    )
    for command in (shlex.split(str(document["command"])), [str(folder / "submit.sh")]):
        subprocess.run(command, cwd=same_folder, env={**os.environ, "PATH": path}, check=True)
    elsewhere = subprocess.run([str(folder / "submit.sh")], cwd="/", env={**os.environ, "PATH": path})
    assert elsewhere.returncode == 0
    calls = (same_folder / "calls").read_text().splitlines()
    assert len(calls) == 6
    assert len(set(calls)) == 2
    assert calls[0] == str(same_folder)


@pytest.mark.parametrize("kind", ["TrainJob", "JobSet"])
def test_pods_find_the_plan_in_the_written_config_map(same_folder: Path, kind: str) -> None:
    folder, _ = _write(same_folder, kind)
    config_map = json.loads((folder / "job.config-map.json").read_text())
    assert config_map["data"]["plan.json"] == (folder / "plan.json").read_text()
    assert config_map["data"]["job.json"] == (folder / "job.json").read_text()
    assert f"name: {config_map['metadata']['name']}" in (folder / "job.yaml").read_text()
    assert yaml.safe_load((folder / "job.yaml").read_text())["metadata"]["name"]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("slurm", "it has not started"),
        ("TrainJob", "kubectl tells if it runs"),
        ("JobSet", "kubectl tells if it runs"),
        ("skypilot", "sky tells if it runs"),
    ],
)
def test_a_written_run_is_listed_and_kept(same_folder: Path, kind: str, says: str) -> None:
    folder, _ = _write(same_folder, kind)

    def runs(*words: str) -> tuple[str, str]:
        done = run_in_process(("runs", *words), cwd=same_folder, environment={"PATH": "/nowhere"})
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    assert runs("status")[0].endswith(f"end:    written with --write-only; {says}\n")
    status = json.loads(runs("status", "--json")[0])
    assert (status["scheduler"], status["job_id"], status["num_starts"]) == (
        kind if kind in ("slurm", "skypilot") else "kubernetes",
        None,
        0,
    )
    assert not status["is_running"]
    assert [run["state"] for run in json.loads(runs("list", "--json")[0])] == ["written"]
    assert "may still be submitted" in runs("prune", "--keep-last", "0")[1]
    assert folder.is_dir()


def test_a_dry_run_writes_nothing_and_says_what_does(same_folder: Path) -> None:
    shutil.copy(_SCRIPTS / "loop.py", same_folder)
    words = ("--dry-run", *_KINDS["slurm"], "--gpus", "8xH100", *_MODEL, "loop.py", "8", "0")
    done = run_in_process(("submit", *words), cwd=same_folder)
    assert done.returncode == 0, done.stderr
    said, command = done.stdout.splitlines()[-2:]
    assert said == (
        "# nothing was written: --write-only writes these files, and this command submits the job:"
    )
    assert command.startswith("sbatch --parsable ")
    assert not (same_folder / "zerofit-runs").exists()
    both = run_in_process(("submit", "--write-only", *words), cwd=same_folder)
    assert both.returncode == 2
    assert "leave one out" in both.stderr


def test_what_can_not_be_written_leaves_no_folder(same_folder: Path) -> None:
    shutil.copy(_SCRIPTS / "loop.py", same_folder)
    words = ("--write-only", "--on", "slurm", "--gpus", "8xH100", *_MODEL, "--scheduler-option", "gres=gpu:1")
    done = run_in_process(("submit", *words, "loop.py", "8", "0"), cwd=same_folder)
    assert done.returncode == 2
    assert "error[scheduler-option]" in done.stderr
    assert list((same_folder / "zerofit-runs").glob("2*")) == []


_ITS_BATCH = ("--global-batch-size", "2")
_SLURM = """
case "$(basename "$0") $*" in
  scontrol*hostnames*) echo 127.0.0.1 ;;
  squeue*) echo 77 COMPLETED None ;;
  srun*) while [ "${1#--}" != "$1" ]; do shift; done; exec "$@" ;;
esac
"""
"""What a job calls, on a cluster of this machine alone."""


@pytest.mark.slow
def test_a_written_job_runs_as_it_is_and_is_then_followed(same_folder: Path) -> None:
    nodes = ("--num-machines", "1", "--gpus", "1xA100-80G")
    folder, _ = _write(same_folder, "slurm", *nodes, "--cpu", *_ITS_BATCH)
    path = path_with(same_folder, "scontrol", "squeue", "srun", script=_SLURM)
    ran = subprocess.run(
        ["bash", str(folder / "job.sbatch")],
        cwd=same_folder,
        env=environment(PATH=path, SLURM_JOB_ID="77", SLURM_NODEID="0", SLURM_JOB_NODELIST="n"),
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert len((same_folder / "losses.jsonl").read_text().splitlines()) == 16
    done = run_in_process(("runs", "status", "--json"), cwd=same_folder, environment={"PATH": path})
    status = json.loads(done.stdout)
    assert (status["scheduler"], status["job_id"], status["num_starts"]) == ("slurm", "77", 1)
    assert (status["exit_code"], status["cause"], status["step"]) == (0, None, 16)
    assert status["started_at"] < status["ended_at"]
