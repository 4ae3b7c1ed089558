"""The recipe launch/kubernetes.yaml: an indexed Job, one pod a node, and the name by which they meet."""

from __future__ import annotations

from typing import Any

_NAME = "zerofit"
_PORT = 29500
_HEAD = """\
# Trains a script on a Kubernetes cluster: one pod a node. Written by `make presets`.
#
#   edit the image, the command's last line and the volumes, then: kubectl apply -f launch/kubernetes.yaml
#
# The image holds zerofit and the script; no operator is needed.
"""


def kubernetes_yaml(*, preset: str, num_nodes: int, ranks_per_node: int) -> str:
    """Return the recipe for a Kubernetes cluster."""
    import yaml

    documents = (_service(), _job(preset, num_nodes, ranks_per_node))
    return _HEAD + "---\n".join(yaml.safe_dump(document, sort_keys=False) for document in documents)


def _service() -> dict[str, Any]:
    """Return the headless service that gives each pod a name."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": _NAME},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # pods look for pod 0 before it is ready
            "selector": {"job-name": _NAME},
        },
    }


def _job(preset: str, num_nodes: int, ranks_per_node: int) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": _NAME},
        "spec": {
            "completions": num_nodes,
            "parallelism": num_nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "template": {"spec": _pod(preset, num_nodes, ranks_per_node)},
        },
    }


def _pod(preset: str, num_nodes: int, ranks_per_node: int) -> dict[str, Any]:
    container = {
        "name": "train",
        "image": "registry.example/zerofit:latest",
        # JOB_COMPLETION_INDEX is set by an indexed Job, and $(...) expanded by Kubernetes, not by a shell.
        "command": [
            *("zerofit", "launch", "--preset", preset),
            *("--num-machines", str(num_nodes), "--machine-rank", "$(JOB_COMPLETION_INDEX)"),
            *("--nproc-per-node", str(ranks_per_node)),
            *("--main-process-ip", f"{_NAME}-0.{_NAME}", "--main-process-port", str(_PORT)),
            "train.py",
        ],
        "resources": {"limits": {"nvidia.com/gpu": ranks_per_node}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    return {
        "subdomain": _NAME,
        "restartPolicy": "Never",
        "containers": [container],
        # NCCL and DataLoader workers share memory; a container's default of 64 MiB is too little.
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
