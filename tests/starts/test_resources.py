"""launch/resources.py: what a plan asks of Slurm and of Kubernetes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
import yaml
from runs import ROOT, run_command

if TYPE_CHECKING:
    from pathlib import Path

_RESOURCES = (sys.executable, str(ROOT / "launch" / "resources.py"), "plan.json")
_MODEL = (
    "plan --fast --model gpt2 --seq-len 128 --global-batch-size 16 --gpus 4xA100-80G --nodes 2 --cpu-cores 16"
)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a folder with a plan for two nodes of four GPUs."""
    command = [sys.executable, "-m", "zerofit", *_MODEL.split(), "--output", "plan.json"]
    run_command(command, tmp_path).check()
    return tmp_path


def test_slurm_and_kubernetes_are_asked_for_what_the_plan_needs(place: Path) -> None:
    flags = run_command(_RESOURCES, place).check().stdout.split()
    assert flags[:3] == ["--nodes=2", "--gpus-per-node=4", "--cpus-per-task=16"]
    memory_gib = int(flags[3].removeprefix("--mem=").removesuffix("G"))
    assert 4 < memory_gib < 40  # four ranks with their libraries, and little else
    timed = run_command((*_RESOURCES, "--steps", "1000000"), place).check().stdout.split()
    assert timed[:4] == flags
    assert 31 <= int(timed[4].removeprefix("--time=")) < 48 * 60

    job_file = str(ROOT / "launch" / "kubernetes.yaml")
    text = run_command((*_RESOURCES, "--job", job_file), place).check().stdout
    service, job = yaml.safe_load_all(text)
    assert (service["kind"], job["spec"]["completions"], job["spec"]["parallelism"]) == ("Service", 2, 2)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["resources"] == {
        "requests": {"cpu": 16, "memory": f"{memory_gib}Gi"},
        "limits": {"memory": f"{memory_gib}Gi", "nvidia.com/gpu": 4},
    }
    command = container["command"]
    assert command[command.index("--num-machines") + 1] == "2"
    assert command[command.index("--plan") + 1] == "/plan/plan.json"


def test_a_recipe_ends_with_an_error_on_a_node_without_gpus(place: Path) -> None:
    (place / "train.py").touch()
    settings = {"NUM_NODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "CUDA_VISIBLE_DEVICES": ""}
    recipe = str(ROOT / "launch" / "multi_node.sh")
    for flags in ((), ("--plan", "plan.json")):
        run = run_command((recipe, *flags, "train.py"), place, **settings)
        assert (run.exit_code, run.stderr.splitlines()[0]) == (
            2,
            "error[no-gpu]: no GPU is visible on this node",
        )
