"""Managed jobs of SkyPilot: its own client takes them; no cloud is asked.

SkyPilot brings 90 packages, so that it has an environment of its own, which the slow tests install.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from clients import path_with
from namespaces import NamespaceNodes, can_make_nodes
from runs import RunZerofit, run_command

_SCRIPTS = Path(__file__).parent / "scripts"
_SUBMIT = (sys.executable, "-m", "zerofit", "submit", "--on", "skypilot", "--fast", "--num-machines", "2")
_VERSION = "0.14.1"
_READ_JOB = """
import json, sys
from sky import Task
from sky.jobs.utils import generate_managed_job_cluster_name
from sky.utils.common_utils import check_cluster_name_is_valid
from sky.utils.ux_utils import CommandHintType, command_hint_messages

task = Task.from_yaml(sys.argv[1])
check_cluster_name_is_valid(generate_managed_job_cluster_name(task.name, 7))
(one,) = task.resources
said = {"accelerators": one.accelerators, "recovery": one.job_recovery, "nodes": task.num_nodes}
hint = command_hint_messages(CommandHintType.MANAGED_JOB, job_id="7")
print(json.dumps({**said, "envs": dict(task.envs), "secrets": list(task.secrets), "hint": hint}))
"""


def _job(place: Path, *words: str, says: str = "Managed Job ID: 7", **more: str) -> tuple[Path, str]:
    """Submit to a client that says so; return the job's file and the client's arguments."""
    shutil.copy(_SCRIPTS / "loop.py", place)
    path = path_with(place, "sky", script=f'echo "$@" >{place}/calls; echo "{says}"')
    run_command((*_SUBMIT, *words, "loop.py", "4", "0"), place, **more, PATH=path).check()
    (folder,) = (place / "zerofit-runs").glob("2*")
    return folder / "job.sky.yaml", (place / "calls").read_text().strip()


_QUEUES: tuple[tuple[list[dict[str, Any]], str | None], ...] = (
    ([{"job_id": 6, "status": "RUNNING"}, {"job_id": 7, "status": "FAILED_SETUP"}], "FAILED_SETUP"),
    ([{"job_id": 7, "status": "RECOVERING"}], "RECOVERING"),
    ([], None),
)


def test_the_state_is_that_of_the_queue(run_zerofit: RunZerofit, same_folder: Path) -> None:
    _job(same_folder, "--gpus", "1xA100-80G")
    for records, state in _QUEUES:
        queue = f"echo 'Checking the controller [1/2]'; echo '{json.dumps(records, indent=2)}'"
        path = path_with(
            same_folder, "sky", script=f'[ "$*" = "jobs queue --all --output json" ] && {{ {queue}; }}'
        )
        told = run_zerofit("runs", "status", "--json", cwd=same_folder, environment={"PATH": path})
        status = json.loads(told.stdout)
        assert (status["job_id"], status["scheduler_state"]) == ("7", state)


def test_a_cloud_out_of_reach_is_no_refusal(same_folder: Path) -> None:
    said = "sky.exceptions.CloudError: requests error (ConnectionError): Max retries exceeded with url: /x"
    shutil.copy(_SCRIPTS / "loop.py", same_folder)
    path = path_with(same_folder, "sky", script=f"echo '{said}' >&2; exit 1")
    done = run_command((*_SUBMIT, "--gpus", "1xA100-80G", "loop.py", "4", "0"), same_folder, PATH=path)
    assert done.exit_code == 1
    assert "error[scheduler-unreachable]: sky can't reach its scheduler\n" in done.stderr
    assert said in done.stderr
    assert not list(same_folder.glob("zerofit-runs/2*"))


@pytest.fixture(scope="session")
def skypilot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install SkyPilot; return the folder of its programs."""
    folder = tmp_path_factory.mktemp("skypilot")
    subprocess.run((sys.executable, "-m", "venv", folder), check=True)
    pip = (folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check")
    subprocess.run((*pip, f"skypilot=={_VERSION}"), check=True)
    return folder / "bin"


@pytest.mark.slow
def test_skypilot_takes_the_job_and_each_command(same_folder: Path, skypilot: Path) -> None:
    words = ("--gpus", "8xA100-80G", "--env", "HF_TOKEN", "--volume", "s3://bucket:/data", "--image", "a/b:1")
    job, call = _job(same_folder, *words, HF_TOKEN="hf_not_for_files")
    there = {**os.environ, "HOME": str(same_folder), "HF_TOKEN": "hf_not_for_files"}
    command = (skypilot / "python", "-c", _READ_JOB, job)
    done = subprocess.run(command, cwd=same_folder, env=there, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout.splitlines()[-1])
    assert read["accelerators"] == {"A100-80GB": 8}
    assert read["nodes"] == 2
    assert read["recovery"]["recover_on_exit_codes"] == [75]
    assert "HF_TOKEN" not in read["envs"]
    (same_folder / "again").mkdir()
    _job(same_folder / "again", "--gpus", "1xA100-80G", says=read["hint"])
    (submitted,) = (same_folder / "again" / "zerofit-runs").glob("*/submitted.json")
    assert json.loads(submitted.read_text())["job_id"] == "7"
    verbs = ("jobs queue --all --output json", "jobs cancel --yes 7", "jobs logs --no-follow 7")
    for words in (shlex.split(call), *map(str.split, verbs)):  # an unknown flag is an error before --help
        helped = subprocess.run(
            (skypilot / "sky", *words, "--help"), env=there, capture_output=True, text=True
        )
        assert helped.returncode == 0, helped.stderr


@pytest.mark.faults
@pytest.mark.skipif(not can_make_nodes(), reason="network namespaces need root and iproute2")
def test_the_commands_of_two_nodes_run_as_they_are_written(same_folder: Path, built_ops: None) -> None:
    job, _ = _job(same_folder, "--gpus", "1xA100-80G", "--zero-stage", "2", "--cpu", "--image", "a/b:1")
    document = yaml.safe_load(job.read_text())
    homes = [same_folder / f"home{node}" for node in (0, 1)]
    with NamespaceNodes(2) as nodes:
        addresses = "\n".join(nodes.address(node) for node in (0, 1))
        started = []
        for node, home in enumerate(homes):
            for place, source in document["file_mounts"].items():
                target = home / place.removeprefix("~/")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
            own = {"HOME": str(home), "SKYPILOT_NODE_RANK": str(node), "SKYPILOT_NODE_IPS": addresses}
            variables = document.get("envs", {}) | own
            words, output = ["bash", "-c", document["run"]], same_folder / f"out{node}"
            started.append(nodes.start(node, words, same_folder, output, **variables))
        codes = [one.wait(timeout=150) for one in started]
    assert codes == [0, 0], (same_folder / "out0").read_text()
    assert "2 nodes have met" in (same_folder / "out0").read_text()
    assert len((same_folder / "losses.jsonl").read_text().splitlines()) == 4
