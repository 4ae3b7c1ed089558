"""SkyPilot: a run as a managed job's file, and its client's commands."""

from __future__ import annotations

import json
import math
import re
import shlex
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError, bad_value
from zerofit.core.secrets import is_secret
from zerofit.core.units import GIB
from zerofit.launching.clusters.job import (
    NODE_MODULE,
    STOP_FILE,
    Rendered,
    check_image,
    job_name,
    launcher_lines,
    yaml_text,
)
from zerofit.launching.diagnose import EXIT_STOPPED

if TYPE_CHECKING:
    from pathlib import Path

    from zerofit.launching.clusters.job import ClusterFlags, Submission

JOIN_LIMIT_S = 900.0
"""Nodes are set up independently. ASSUMPTION, as for pods."""
OVER = ("SUCCEEDED", "CANCELLED", "FAILED")
"""Each FAILED_... too: sky/jobs/state.py, ManagedJobStatus (0.14)."""
CLIENT = "sky"
NO_SUCH_JOB = None
"""Its queue omits unknown jobs."""
_SUBMIT_LIMIT_S = 900.0
"""It uploads the work folder, and the first job starts the machine that controls all. ASSUMPTION."""
_JOB_MOUNT = "~/zerofit-job"
_PORT = 29500
_SPEC = re.compile(r"(\d+)x(.+)")


def check(flags: ClusterFlags) -> None:
    """Check the user's names of image and volume, before anything is planned.

    Raises:
        UserError: one is invalid.
    """
    check_image(flags.image)
    _volume(flags)


def run_folder(folder: Path, flags: ClusterFlags) -> str:
    """Return the run folder on the nodes: in the bucket that outlives them, if any."""
    volume = _volume(flags)
    return f"{volume[1]}/zerofit-runs/{folder.name}" if volume else f"/tmp/zerofit-runs/{folder.name}"


def render(submission: Submission) -> Rendered:
    """Return the job's file, and the command that submits it."""
    job, flags, resources = submission.job, submission.flags, submission.resources
    requested: dict[str, Any] = {"accelerators": _accelerators(submission)} if resources.gpus_per_node else {}
    requested |= {
        "cpus": f"{resources.cores_per_node}+",
        "memory": f"{math.ceil(resources.memory_bytes / GIB)}+",
        "job_recovery": {"max_restarts_on_errors": 0, "recover_on_exit_codes": [EXIT_STOPPED]}
        if job.max_requeues
        else {"max_restarts_on_errors": 0},
    }
    if flags.image is not None:
        requested["image_id"] = f"docker:{flags.image.removeprefix('docker:')}"
    volume = _volume(flags)
    mounts: dict[str, Any] = {
        f"{_JOB_MOUNT}/{name}": str(submission.folder / name) for name in ("plan.json", "job.json")
    }
    if volume:
        mounts[volume[1]] = {"source": volume[0], "mode": "MOUNT"}
    variables = submission.environment
    document = {
        "name": job_name(job.run),
        "num_nodes": resources.num_nodes,
        "workdir": ".",
        "resources": requested,
        "file_mounts": mounts,
        "envs": {name: value for name, value in variables.items() if not is_secret(name, value)},
        "run": "\n".join(_run(submission)) + "\n",
    }
    secrets = [name for name, value in variables.items() if is_secret(name, value)]
    if secrets:
        document["secrets"] = dict.fromkeys(secrets)
    path = submission.folder / "job.sky.yaml"
    words = [word for name in secrets for word in ("--secret", name)]
    return Rendered(
        files={path: yaml_text(document)},
        command=("sky", "jobs", "launch", "--yes", "--detach-run", *words, str(path)),
        limit_s=_SUBMIT_LIMIT_S,
    )


def _run(submission: Submission) -> list[str]:
    folder = submission.job.run_folder
    launcher = (
        f"{submission.python} -m {NODE_MODULE} {_JOB_MOUNT} "
        f'--node "$SKYPILOT_NODE_RANK" --address "$first" --port {_PORT}'
    )
    return [
        f"mkdir -p {shlex.quote(folder)}",
        'first=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
        *launcher_lines(launcher, stop_file=f"{folder}/{STOP_FILE}", signal="TERM"),
        'exit "$code"',
    ]


def _accelerators(submission: Submission) -> str:
    """Return the GPUs of a node in SkyPilot's names: "H100:8", "A100-80GB:8", "A100:8" with 40 GB."""
    found = _SPEC.fullmatch(submission.gpus or "")
    if found is None:
        raise UserError(
            "gpus-missing",
            "SkyPilot needs the GPU model",
            found=f"--gpus {submission.gpus}" if submission.gpus else "--plan without --gpus",
            why="it searches for a cloud that has it",
            fix="set it as in --gpus 8xH100",
        )
    kind = re.sub(r"-(\d+)G$", r"-\1GB", found[2]).replace("A100-40GB", "A100")
    return f"{kind}:{found[1]}"


def _volume(flags: ClusterFlags) -> tuple[str, str] | None:
    """Return the bucket, and its mount path."""
    if flags.volume is None:
        return None
    bucket, joint, path = flags.volume.rpartition(":")
    if joint and "://" in bucket and path.startswith("/"):
        return bucket, path.rstrip("/")
    raise bad_value(
        "--volume",
        flags.volume,
        why="it must be a bucket and the folder on the nodes",
        fix="write it as in --volume s3://checkpoints:/data",
    )


def job_id_of(output: str) -> str:
    """Return the managed job's id from the client's output: "Managed Job ID: 7"."""
    found = re.search(r"Job ID: (\d+)", output)
    return found[1] if found else ""


def state_command(job_id: str, namespace: str | None) -> tuple[str, ...]:
    """Return the command that prints the states of all jobs."""
    return ("sky", "jobs", "queue", "--all", "--output", "json")


def state_of(output: str, job_id: str) -> str | None:
    """Return the state in that command's output; None if the job is not in it."""
    found = re.search(r"^\[.*", output, re.MULTILINE | re.DOTALL)  # lines on its server may come before
    records = json.loads(found[0]) if found else []
    return next((record.get("status") for record in records if str(record.get("job_id")) == job_id), None)


def cancel_command(job_id: str, namespace: str | None) -> tuple[str, ...]:
    """Return the command that cancels a job."""
    return ("sky", "jobs", "cancel", "--yes", job_id)


def logs_command(job_id: str, namespace: str | None, *, follows: bool) -> tuple[str, ...]:
    """Return the command that prints a job's output."""
    return ("sky", "jobs", "logs", *(() if follows else ("--no-follow",)), job_id)
