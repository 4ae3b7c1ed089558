"""The user's own labels, annotations and fields of pods, in a TrainJob or a JobSet."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zerofit.launching.clusters.scheduler_options import (
    FLAG,
    SchedulerOption,
    check_not_own,
    parse_options,
    refused,
    unknown_option,
    yaml_value,
)

if TYPE_CHECKING:
    from zerofit.launching.clusters.job import ClusterFlags

_POD_OF_TRAIN_JOB = frozenset(
    [
        "affinity",
        "imagePullSecrets",
        "schedulingGates",
        "securityContext",
        "serviceAccountName",
        "tolerations",
    ]
)
"""kubeflow/trainer, pkg/apis/trainer/v1alpha1, PodSpecPatch."""
_POD = _POD_OF_TRAIN_JOB | frozenset(
    [
        "automountServiceAccountToken",
        "dnsConfig",
        "dnsPolicy",
        "enableServiceLinks",
        "hostAliases",
        "hostIPC",
        "hostNetwork",
        "hostPID",
        "hostUsers",
        "initContainers",
        "nodeName",
        "overhead",
        "preemptionPolicy",
        "priority",
        "priorityClassName",
        "readinessGates",
        "resourceClaims",
        "runtimeClassName",
        "schedulerName",
        "serviceAccount",
        "shareProcessNamespace",
        "topologySpreadConstraints",
    ]
)
"""https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/, PodSpec."""
_JOB_OF_TRAIN_JOB = frozenset(("managedBy", "suspend"))
_JOB_OF_JOB_SET = _JOB_OF_TRAIN_JOB | {"ttlSecondsAfterFinished"}
_RESOURCE, _RUNTIME = "resources.", "runtime"
_LABEL, _ANNOTATION = "labels.", "annotations."
_RESOURCE_NAME = re.compile(r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?")
_OWN = {
    "containers": "use --image, --env and --volume",
    "volumes": "use --volume",
    "nodeSelector": "use --node-selector",
    "terminationGracePeriodSeconds": "use --save-time",
    "activeDeadlineSeconds": "use --time",
    "restartPolicy": "use --max-requeues",
    "hostname": "leave it out: the nodes find each other by the names of their pods",
    "subdomain": "leave it out: the nodes find each other by the names of their pods",
    "resources.cpu": "use --cpu-cores",
    "resources.nvidia.com/gpu": "set the GPUs of a node with --gpus",
}
_QUEUE = "kueue.x-k8s.io/"
"""Labels of the job alone: Kueue admits pods with them one by one."""
_KEY = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?)?")
"""https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/; annotations have such keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesOptions:
    """What the user adds to a job and its pods."""

    pod: dict[str, Any] = field(default_factory=dict)
    """Fields of a pod's spec."""
    job: dict[str, Any] = field(default_factory=dict)
    """Fields of the job's spec."""
    resources: dict[str, str] = field(default_factory=dict)
    """Further resources of the container, requested and limited: {"rdma/ib": "1"}."""
    runtime: str | None = None
    """Name of a ClusterTrainingRuntime; None for Kubeflow's own."""
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)

    @property
    def metadata(self) -> dict[str, Any]:
        """Labels and annotations of the job."""
        return _filled({"labels": self.labels, "annotations": self.annotations})

    @property
    def pod_metadata(self) -> dict[str, Any]:
        """The same of its pods, as {"metadata": ...}; empty if there are none."""
        labels = {key: value for key, value in self.labels.items() if not key.startswith(_QUEUE)}
        metadata = _filled({"labels": labels, "annotations": self.annotations})
        return {"metadata": metadata} if metadata else {}


def _filled(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value}


def kubernetes_options(flags: ClusterFlags) -> KubernetesOptions:
    """Return the user's options for Kubernetes.

    Raises:
        UserError: one is unknown, invalid, or set by zerofit itself.
    """
    of = "a TrainJob's pods" if flags.has_trainer else "a JobSet's pods"
    pod_fields = _POD_OF_TRAIN_JOB if flags.has_trainer else _POD
    job_fields = _JOB_OF_TRAIN_JOB if flags.has_trainer else _JOB_OF_JOB_SET
    pod, job, resources, labels, annotations, runtime = {}, {}, {}, {}, {}, None
    for option in parse_options(flags.options):
        check_not_own(option, _OWN)
        if option.name.startswith(_RESOURCE) and _RESOURCE_NAME.fullmatch(option.name[len(_RESOURCE) :]):
            resources[option.name[len(_RESOURCE) :]] = str(yaml_value(option))
        elif option.name.startswith(_LABEL):
            labels[_key(option, _LABEL)] = _label_value(option)
        elif option.name.startswith(_ANNOTATION):
            annotations[_key(option, _ANNOTATION)] = option.value or ""
        elif option.name == _RUNTIME and flags.has_trainer:
            if not _KEY.fullmatch(runtime := option.value or ""):
                raise refused(
                    str(option),
                    why="it must be a runtime's name",
                    fix="`kubectl get clustertrainingruntimes` lists them",
                )
        elif option.name in pod_fields:
            pod[option.name] = yaml_value(option)
        elif option.name in job_fields:
            job[option.name] = yaml_value(option)
        elif option.name in _POD | _JOB_OF_JOB_SET:
            raise refused(
                str(option),
                why="a TrainJob can't set it in its pods: its runtime does",
                fix="submit a JobSet: --job-set, or a runtime that has it: --scheduler-option runtime=NAME",
            )
        else:
            prefixes = {f"{_RESOURCE}NAME", f"{_LABEL}KEY", f"{_ANNOTATION}KEY"}
            names = pod_fields | job_fields | prefixes | ({_RUNTIME} if flags.has_trainer else set())
            raise unknown_option(option, names, of=of)
    return KubernetesOptions(
        pod=pod,
        job=job,
        resources=resources,
        runtime=runtime,
        labels=labels,
        annotations=annotations,
    )


def _key(option: SchedulerOption, prefix: str) -> str:
    """Return the key of a label or an annotation."""
    key = option.name.removeprefix(prefix)
    if option.value is None or not _KEY.fullmatch(key):
        raise refused(
            str(option),
            why="it needs a key such as example.com/team, and a value",
            fix=f"write it as in {FLAG} {prefix}example.com/team=nlp",
        )
    return key


def _label_value(option: SchedulerOption) -> str:
    if not _LABEL_VALUE.fullmatch(option.value or ""):
        raise refused(
            str(option),
            why="a label's value has at most 63 letters, digits and . _ - , and begins and ends with one of "
            "the first two",
            fix=f"shorten it, or make it an annotation: {FLAG} {_ANNOTATION}KEY=TEXT",
        )
    return option.value or ""
