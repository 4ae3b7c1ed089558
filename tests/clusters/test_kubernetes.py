"""Manifests for Kubernetes: they hold against the schemas of their resources, and each pod's command runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from clients import path_with
from namespaces import NamespaceNodes, can_make_nodes
from runs import RunZerofit, run_command

_SCRIPTS = Path(__file__).parent / "scripts"
_SUBMIT = (sys.executable, "-m", "zerofit", "submit", "--on", "kubernetes", "--image", "i:1")
_NODES = ["--num-machines", "2", "--gpus", "1xA100-80G", "--zero-stage", "2", "--fast"]
_START_S = 150
_POD_FOLDERS = ("/zerofit/job", "/zerofit/run")


def _manifest(place: Path, *words: str, **more: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the ConfigMap and the job that `zerofit submit` has kubectl create."""
    shutil.copy(_SCRIPTS / "loop.py", place)
    path = path_with(place, "kubectl", script=f'echo "$@" >>{place}/calls; echo configmap/zf; echo jobs/zf')
    done = run_command((*_SUBMIT, *_NODES, *words, "loop.py", "4", "0"), place, **more, PATH=path).check()
    assert done.stdout == "jobs/zf\n"
    (folder,) = (place / "zerofit-runs").glob("2*")
    files = f"--filename={folder}/job.config-map.json --filename={folder}/job.yaml"
    create = f"create --output=name {files}"
    assert (place / "calls").read_text().splitlines() == [f"{create} --dry-run=server", create]
    config_map = json.loads((folder / "job.config-map.json").read_text())
    return config_map, yaml.safe_load((folder / "job.yaml").read_text())


@pytest.mark.parametrize(
    ("says", "error"),
    [
        ("The connection to the server localhost:8080 was refused - did you specify the right host or port?",)
        * 2,
        ("error: current-context is not set",) * 2,
        ('Error from server (NotFound): namespaces "x" not found', None),
    ],
)
def test_a_cluster_out_of_reach_is_no_refusal(same_folder: Path, says: str, error: str | None) -> None:
    shutil.copy(_SCRIPTS / "loop.py", same_folder)
    path = path_with(same_folder, "kubectl", script=f"echo '{says}' >&2; exit 1")
    done = run_command((*_SUBMIT, *_NODES, "loop.py", "4", "0"), same_folder, PATH=path)
    assert done.exit_code == 1
    what = "kubectl can't reach its scheduler" if error else "kubectl refused the request"
    assert f"error[scheduler-{'unreachable' if error else 'refused'}]: {what}\n" in done.stderr
    assert says in done.stderr
    assert ("`kubectl cluster-info` tells if one responds" in done.stderr) == bool(error)


def test_a_dry_run_shows_the_job_and_not_the_plan(same_folder: Path) -> None:
    shutil.copy(_SCRIPTS / "loop.py", same_folder)
    words = ("--dry-run", "--cpu", *_NODES, "loop.py", "4", "0")
    done = run_command((*_SUBMIT, *words), same_folder).check()
    assert len(done.stdout.splitlines()) < 120
    assert "kind: TrainJob" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("kubectl create --output=name --filename=")
    assert "activeDeadlineSeconds" not in done.stdout  # of ranks on the CPU nobody predicts it
    assert "--cpu: host memory is requested as for the plan on GPUs, but no GPU" in done.stderr


def test_an_output_folder_beside_the_volume_is_named(same_folder: Path) -> None:
    shutil.copy(_SCRIPTS / "trainer.py", same_folder)
    words = ("--dry-run", "--volume", "checkpoints:/data", *_NODES)
    done = run_command((*_SUBMIT, *words, "trainer.py", "4", "0"), same_folder).check()
    assert (
        "checkpoints go to out, which is lost with its node: --volume only keeps /data; make the script "
        "write to /data/out" in done.stderr
    )


@pytest.mark.parametrize(
    ("words", "model"),
    [((), "TrainerV1alpha1TrainJob"), (("--job-set",), "JobsetV1alpha2JobSet")],
    ids=["TrainJob", "JobSet"],
)
def test_a_manifest_holds_against_the_schema(same_folder: Path, words: tuple[str, ...], model: str) -> None:
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed"
    )
    volume = ("--volume", "checkpoints:/data", "--env", "MY_TOKEN", "--node-selector", "a/b=c")
    config_map, job = _manifest(same_folder, *words, *volume, MY_TOKEN="not_for_files")
    # The models take unknown fields silently: what comes back shows whether all of them were known.
    assert _without_none(getattr(models, model).from_dict(job).to_dict()) == job
    assert _without_none(models.IoK8sApiCoreV1ConfigMap.from_dict(config_map).to_dict()) == config_map
    assert "not_for_files" not in json.dumps([config_map, job])


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, list) else value


def test_a_pod_asks_for_what_the_plan_needs(same_folder: Path) -> None:
    label = "nvidia.com/gpu.product=NVIDIA-A100-SXM4-80GB"
    _, job = _manifest(same_folder, "--time", "60", "--node-selector", label)
    (patch,) = job["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    selected = replicated["template"]["spec"]["template"]["spec"]["nodeSelector"]
    assert selected == {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}
    trainer = job["spec"]["trainer"]
    assert trainer["numNodes"] == 2
    memory = trainer["resourcesPerNode"]["limits"]["memory"]
    assert re.fullmatch(r"\dGi", memory)
    assert trainer["resourcesPerNode"] == {
        "requests": {"cpu": "6", "memory": memory, "nvidia.com/gpu": "1"},
        "limits": {"memory": memory, "nvidia.com/gpu": "1"},
    }
    assert job["spec"]["activeDeadlineSeconds"] == 3600


def test_pods_need_an_image(run_zerofit: RunZerofit, same_folder: Path) -> None:
    shutil.copy(_SCRIPTS / "loop.py", same_folder)
    done = run_zerofit("submit", "--on", "kubernetes", *_NODES, "loop.py", "4", "0", cwd=same_folder)
    assert done.returncode == 2
    assert done.stderr == (
        "error[image-missing]: pods need an image\n"
        "  found: --on kubernetes without --image\n"
        "  why:   the container must have zerofit, the script and its imports\n"
        "  fix:   name it: --image registry.example/train:1\n"
    )


@pytest.fixture
def pod_folders() -> Iterator[None]:
    """Make the folders at which a pod's volumes are mounted."""
    for name in _POD_FOLDERS:
        os.makedirs(name, exist_ok=True)
    yield
    for name in (*_POD_FOLDERS, "/zerofit"):
        os.rmdir(name)


def _of_operator(job: dict[str, Any], index: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the container of a pod, and the variables that the operator sets in it.

    Sources: kubeflow/trainer, pkg/runtime/framework/plugins/torch; Kubernetes' docs on indexed Jobs.
    """
    name = job["metadata"]["name"]
    if job["kind"] == "TrainJob":
        variables = {
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": str(job["spec"]["trainer"]["numProcPerNode"]),
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
            "PET_MASTER_PORT": "29500",
        }
        return job["spec"]["trainer"], variables
    (replicated,) = job["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    return container, {"JOB_COMPLETION_INDEX": str(index)}


@pytest.mark.faults
@pytest.mark.skipif(not can_make_nodes(), reason="network namespaces need root and iproute2")
@pytest.mark.parametrize("words", [(), ("--job-set",)], ids=["TrainJob", "JobSet"])
def test_each_pods_command_runs_as_it_is_written(
    same_folder: Path, pod_folders: None, built_ops: None, words: tuple[str, ...]
) -> None:
    config_map, job = _manifest(same_folder, "--cpu", *words)
    (same_folder / "mounted").mkdir()
    for name, text in config_map["data"].items():
        (same_folder / "mounted" / name).write_text(text)
    with NamespaceNodes(2) as nodes:
        name = job["metadata"]["name"]
        nodes.call(f"{name}-node-0-0.{name}", 0)
        pods = []
        for index in (0, 1):
            container, variables = _of_operator(job, index)
            own = {one["name"]: one["value"] for one in container["env"]}
            known = own | variables
            words_of_pod = [
                re.sub(r"\$\((\w+)\)", lambda found, known=known: known.get(found[1], found[0]), word)
                for word in (*container["command"], *container["args"])
            ]
            (same_folder / f"run{index}").mkdir()
            mounts = dict(
                zip(_POD_FOLDERS, (same_folder / "mounted", same_folder / f"run{index}"), strict=True)
            )
            output = same_folder / f"out{index}"
            pods.append(nodes.start(index, words_of_pod, same_folder, output, mounts=mounts, **known))
        codes = [pod.wait(timeout=_START_S) for pod in pods]
    assert codes == [0, 0], (same_folder / "out0").read_text()
    assert "2 nodes have met" in (same_folder / "out0").read_text()
    assert len((same_folder / "losses.jsonl").read_text().splitlines()) == 4
    for index in (0, 1):
        record = json.loads((same_folder / f"run{index}" / "ranks" / f"rank{index}.json").read_text())
        assert record["exit_code"] == 0
