"""Kubernetes: a run as Kubeflow Trainer's TrainJob, or as a JobSet; kubectl's commands."""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError, bad_value
from zerofit.core.plan import plan_to_json
from zerofit.core.secrets import is_secret
from zerofit.core.units import GIB, MIB, format_bytes
from zerofit.core.validation import parse_known
from zerofit.launching.clusters.job import (
    JOB_FILE,
    NODE_MODULE,
    STOP_FILE,
    Rendered,
    check_image,
    job_name,
    job_to_json,
    launcher_lines,
    yaml_text,
)
from zerofit.launching.clusters.kubernetes_options import kubernetes_options
from zerofit.launching.clusters.scheduler_options import refused
from zerofit.launching.diagnose import EXIT_STOPPED

if TYPE_CHECKING:
    from pathlib import Path

    from zerofit.launching.clusters.job import ClusterFlags, Submission

JOIN_LIMIT_S = 900.0
"""Pods start minutes apart, as each node pulls the image. ASSUMPTION: a quarter of an hour is enough."""
OVER = ("Complete", "Failed")
"""Final conditions of a TrainJob or a JobSet; a JobSet's is "Completed"."""
CLIENT = "kubectl"
NO_SUCH_JOB = "(NotFound)"
"""kubectl's message for a missing or deleted object."""
JOB_ID = re.compile(r"[a-z][a-z0-9.-]*/[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?")
"""Kind and name of an object, as kubectl's --output=name prints them."""
_TRAIN_JOB, _JOB_SET = "trainjob.trainer.kubeflow.org", "jobset.jobset.x-k8s.io"
JOB_MOUNT = "/zerofit/job"
_RUN_MOUNT = "/zerofit/run"
_PORT = 29500
_SCRATCH = "ephemeral-storage"
_UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_QUANTITY = re.compile(rf"(\d+(?:\.\d+)?)({'|'.join(_UNITS)})")
"""https://kubernetes.io/docs/concepts/configuration/manage-resources-containers/"""
_CONTAINER = "node"
"""Name of the replicated job and its container; Kubeflow's runtime torch-distributed uses it for both,
too."""
_RUNTIME = "torch-distributed"
_SECRET = "zerofit-env"
"""The Secret for variables with a secret's name."""
_LARGEST_CONFIG_MAP = MIB
"""https://kubernetes.io/docs/concepts/configuration/configmap/"""
_FINAL = ["PodFailurePolicy", "DeadlineExceeded"]
"""Reasons for which a failed Job is not started again: the script's error, its time limit."""
_VOLUME = re.compile(r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?):(/[\w./-]+)")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_LONGEST_NAME = 40
"""Names of pods have a suffix, and 63 characters is the limit of a label."""


def run_folder(folder: Path, flags: ClusterFlags) -> str:
    """Return the run folder in the pods: on the volume that outlives them, if any."""
    volume = _volume(flags)
    return f"{volume[1]}/zerofit-runs/{folder.name}" if volume else _RUN_MOUNT


def render(submission: Submission) -> Rendered:
    """Return the manifests, and the command that creates their objects."""
    name = job_name(submission.job.run[: _LONGEST_NAME - 3])
    make = _train_job if submission.flags.has_trainer else _job_set
    path, config_map = submission.folder / "job.yaml", submission.folder / "job.config-map.json"
    head = "# Written by `zerofit submit`; values of secrets are not in it, only their names.\n"
    head += "".join(f"# {line}\n" for line in submission.comments)
    command = (
        "kubectl",
        *_namespace(submission.flags.namespace),
        "create",  # `apply` would also store the whole object in an annotation, of 256 KiB at most
        "--output=name",
        f"--filename={config_map}",
        f"--filename={path}",
    )
    kind = _TRAIN_JOB if submission.flags.has_trainer else _JOB_SET
    return Rendered(
        job_name=f"{kind}/{name}",
        files={
            path: head + yaml_text(make(submission, name)),
            config_map: json.dumps(_config_map(submission, name), indent=2) + "\n",
        },
        command=command,
        checks=((*command, "--dry-run=server"),),
    )


def check(flags: ClusterFlags) -> None:
    """Check the user's names of namespace, image, labels and volume, before anything is planned.

    Raises:
        UserError: one is invalid.
    """
    if flags.namespace is not None and not is_namespace(flags.namespace):
        raise bad_value(
            "--namespace",
            flags.namespace,
            why="it must be lower-case letters, digits and -, as namespaces are named",
            fix="`kubectl get namespaces` lists them",
        )
    check_image(flags.image)
    _node_selector(flags)
    _volume(flags)
    kubernetes_options(flags)


def is_namespace(name: str) -> bool:
    """Return True if a namespace can have this name."""
    return _LABEL.fullmatch(name) is not None


def _namespace(namespace: str | None) -> tuple[str, ...]:
    return () if namespace is None else (f"--namespace={namespace}",)


def _config_map(submission: Submission, name: str) -> dict[str, Any]:
    data = {"plan.json": plan_to_json(submission.plan), JOB_FILE: job_to_json(submission.job)}
    size = sum(map(len, data.values()))
    if size > _LARGEST_CONFIG_MAP:
        raise UserError(
            "plan-too-large",
            "the plan is too large for a ConfigMap",
            found=f"{format_bytes(size)}",
            why=f"the limit of Kubernetes is {format_bytes(_LARGEST_CONFIG_MAP)}",
            fix="plan without a capture: --model NAME --seq-len N --global-batch-size N",
        )
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def _train_job(submission: Submission, name: str) -> dict[str, Any]:
    resources, flags = submission.resources, submission.flags
    own = kubernetes_options(flags)
    pod = {
        **_node_selector(flags),
        **own.pod,
        "terminationGracePeriodSeconds": flags.save_time_s,
        "volumes": _volumes(submission, name),
        "containers": [{"name": _CONTAINER, "volumeMounts": _mounts(submission)}],
    }
    template = {**own.pod_metadata, "spec": pod}
    patch = {"name": _CONTAINER, "template": {"spec": {"template": template}}}
    spec = {
        **own.job,
        "runtimeRef": {"name": own.runtime or _RUNTIME},
        "trainer": {
            "image": flags.image,
            "numNodes": resources.num_nodes,
            "numProcPerNode": submission.plan.topology.ranks_per_node,
            "command": _command(submission),
            # the kubelet substitutes them: Kubeflow Trainer sets them for its torch runtime
            "args": ["$(PET_NODE_RANK)", "$(PET_MASTER_ADDR)", "$(PET_MASTER_PORT)"],
            "env": _env(submission),
            "resourcesPerNode": _resources(submission),
        },
        "runtimePatches": [
            {
                "manager": "zerofit/submit",
                "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [patch]}}},
            }
        ],
    }
    if (limit_s := flags.wall_time_s or resources.wall_time_s) is not None:
        spec["activeDeadlineSeconds"] = limit_s
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name, **own.metadata},
        "spec": spec,
    }


def _job_set(submission: Submission, name: str) -> dict[str, Any]:
    resources, flags = submission.resources, submission.flags
    own = kubernetes_options(flags)
    container = {
        "name": _CONTAINER,
        "image": flags.image,
        "command": _command(submission),
        # an indexed Job sets the variable, and the kubelet substitutes it
        "args": ["$(JOB_COMPLETION_INDEX)", f"{name}-{_CONTAINER}-0-0.{name}", str(_PORT)],
        "env": _env(submission),
        "resources": _resources(submission),
        "volumeMounts": _mounts(submission),
    }
    job: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": resources.num_nodes,
        "parallelism": resources.num_nodes,
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {"action": "Count", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "FailJob",  # which also ends the JobSet; otherwise it is restarted
                    "onExitCodes": {
                        "containerName": _CONTAINER,
                        "operator": "NotIn",
                        "values": [EXIT_STOPPED],
                    },
                },
            ]
        },
        "template": {
            **own.pod_metadata,
            "spec": {
                "restartPolicy": "Never",
                **_node_selector(flags),
                **own.pod,
                "terminationGracePeriodSeconds": flags.save_time_s,
                "containers": [container],
                "volumes": _volumes(submission, name),
            },
        },
    }
    if (limit_s := flags.wall_time_s or resources.wall_time_s) is not None:
        job["activeDeadlineSeconds"] = limit_s
    fails = {"name": "script", "action": "FailJobSet", "onJobFailureReasons": _FINAL}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, **own.metadata},
        "spec": {
            **own.job,
            "failurePolicy": {"maxRestarts": flags.max_requeues, "rules": [fails]},
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
            "replicatedJobs": [{"name": _CONTAINER, "replicas": 1, "template": {"spec": job}}],
        },
    }


def _command(submission: Submission) -> list[str]:
    """Return the command of a container; its arguments are the node's number, and node 0's address and port.

    The shell handles the SIGTERM of an evicted pod, and makes all nodes save.
    """
    folder = _literal(submission.job.run_folder)  # named after the script, whatever it is called
    launcher = f'{submission.python} -P -m {NODE_MODULE} {JOB_MOUNT} --node "$0" --address "$1" --port "$2"'
    lines = launcher_lines(launcher, stop_file=f"{folder}/{STOP_FILE}", signal="TERM")
    return ["bash", "-c", "\n".join([f"mkdir -p {shlex.quote(folder)}", *lines, 'exit "$code"'])]


def _literal(text: str) -> str:
    """Return a text that the kubelet leaves as it is: it replaces $(NAME) by a variable's value."""
    return text.replace("$(", "$$(")


def _env(submission: Submission) -> list[dict[str, Any]]:
    return [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": _SECRET, "key": name}}}
        if is_secret(name, value)
        else {"name": name, "value": _literal(value)}
        for name, value in submission.environment.items()
    ]


def _node_selector(flags: ClusterFlags) -> dict[str, dict[str, str]]:
    """Return the required node labels as a field of a pod's spec; empty if there are none."""
    for label in flags.node_selector:
        if not re.fullmatch(r"[\w./-]+=[\w.-]*", label):
            raise bad_value(
                "--node-selector",
                label,
                why="it must be a node label and its value",
                fix="`kubectl get nodes --show-labels` lists them; nvidia.com/gpu.product names the GPU",
            )
    labels = dict(label.split("=", 1) for label in flags.node_selector)
    return {"nodeSelector": labels} if labels else {}


def _bytes_of(quantity: str) -> float | None:
    """Return the bytes of a quantity such as "64Gi"; None if it is none."""
    match = _QUANTITY.fullmatch(quantity)
    return float(match[1]) * _UNITS[match[2]] if match else None


def _resources(submission: Submission) -> dict[str, Any]:
    resources = submission.resources
    memory = {"memory": f"{math.ceil(resources.memory_bytes / GIB)}Gi"}
    requests = {"cpu": str(resources.cores_per_node), **memory}
    if resources.scratch_bytes:
        requests[_SCRATCH] = f"{math.ceil(resources.scratch_bytes / GIB)}Gi"
    more = {"nvidia.com/gpu": str(resources.gpus_per_node)} if resources.gpus_per_node else {}
    own = kubernetes_options(submission.flags).resources
    for name in {*own} & {"memory", _SCRATCH} & {*requests}:
        if (_bytes_of(own[name]) or 0) < (_bytes_of(requests[name]) or 0):
            raise refused(
                f"resources.{name}={own[name]}",
                why=f"the plan needs {requests[name]} on each node",
                fix=f"ask for at least resources.{name}={requests[name]}, or leave it out",
            )
    return {"requests": {**requests, **more, **own}, "limits": {**memory, **more, **own}}


def _volumes(submission: Submission, name: str) -> list[dict[str, Any]]:
    resources = submission.resources
    # NCCL and DataLoader workers share memory; a container's default of 64 MiB is too little
    shm = {"medium": "Memory", "sizeLimit": f"{math.ceil(resources.shm_bytes / GIB)}Gi"}
    volumes: list[dict[str, Any]] = [
        {"name": "job", "configMap": {"name": name}},
        {"name": "shm", "emptyDir": shm},
    ]
    volume = _volume(submission.flags)
    claim = {"persistentVolumeClaim": {"claimName": volume[0]}} if volume else {"emptyDir": {}}
    volumes.append({"name": "run", **claim})
    if resources.nvme_path:
        volumes.append({"name": "scratch", "emptyDir": {}})
    return volumes


def _mounts(submission: Submission) -> list[dict[str, str]]:
    volume, nvme_path = _volume(submission.flags), submission.resources.nvme_path
    mounts = [
        {"name": "job", "mountPath": JOB_MOUNT},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "run", "mountPath": volume[1] if volume else _RUN_MOUNT},
    ]
    return [*mounts, {"name": "scratch", "mountPath": nvme_path}] if nvme_path else mounts


def _volume(flags: ClusterFlags) -> tuple[str, str] | None:
    """Return the volume's claim, and its mount path."""
    if flags.volume is None:
        return None
    found = _VOLUME.fullmatch(flags.volume)
    if found is None:
        raise bad_value(
            "--volume",
            flags.volume,
            why="it must be the name of a PersistentVolumeClaim and the folder in the container",
            fix="write it as in --volume checkpoints:/data",
        )
    return found[1], found[3].rstrip("/")


def job_id_of(output: str) -> str | None:
    """Return the last object created by `kubectl create --output=name`: "jobset.jobset.x-k8s.io/zf-..."."""
    found = [word for line in output.splitlines() if JOB_ID.fullmatch(word := line.strip())]
    return found[-1] if found and not found[-1].startswith("configmap/") else None


def find_command(name: str, namespace: str | None) -> tuple[str, ...]:
    """Return the command that prints the object of a kind and name, if there is one."""
    return ("kubectl", *_namespace(namespace), "get", name, "--output=name", "--ignore-not-found")


def found_ids(output: str, name: str, folder: Path) -> tuple[str, ...]:
    """Return the ids in that command's output."""
    job_id = job_id_of(output)
    return () if job_id is None else (job_id,)


def state_command(job_id: str, namespace: str | None) -> tuple[str, ...]:
    """Return the command that prints a job's state."""
    return ("kubectl", *_namespace(namespace), "get", job_id, "--output=json")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Condition:
    """A condition of an object, in kubectl's JSON."""

    type: str
    status: str
    reason: str | None = None
    lastTransitionTime: str | None = None  # noqa: N815  (kubectl's spelling)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Status:
    """An object's status, in kubectl's JSON."""

    conditions: list[_Condition] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Metadata:
    """An object's name, in kubectl's JSON."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _JobObject:
    """A job, in kubectl's JSON; a list, such as an empty one, is none."""

    kind: str
    metadata: _Metadata
    status: _Status = _Status()


def state_of(output: str, job_id: str) -> str | None:
    """Return the state in that command's output; None if the job is not in it.

    It is a final condition that is true, or else the newest that is.
    """
    try:
        found = parse_known(_JobObject, output)
    except ValueError:
        return None
    kind, _, name = job_id.partition("/")
    if (found.kind.lower(), found.metadata.name) != (kind.partition(".")[0], name):
        return None
    true = [condition for condition in found.status.conditions or () if condition.status == "True"]
    if not true:
        return "Running"
    last = max(true, key=lambda it: (it.type.startswith(OVER), it.lastTransitionTime or ""))
    return f"{last.type} ({last.reason})" if last.reason else last.type


def cancel_command(job_id: str, namespace: str | None) -> tuple[str, ...]:
    """Return the command that cancels a job; files on a volume are kept."""
    return ("kubectl", *_namespace(namespace), "delete", job_id, "--wait=false")


def logs_command(job_id: str, namespace: str | None, *, follows: bool) -> tuple[str, ...]:
    """Return the command that prints the output of all nodes."""
    label = f"--selector=jobset.sigs.k8s.io/jobset-name={job_id.rpartition('/')[2]}"
    words = ("--prefix", "--max-log-requests=1000", "--tail=-1", *(("--follow",) if follows else ()))
    return ("kubectl", *_namespace(namespace), "logs", label, *words)
