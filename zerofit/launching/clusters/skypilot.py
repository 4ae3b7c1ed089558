"""SkyPilot: a run as a managed job's file, and its client's commands."""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError, bad_value
from zerofit.core.foreign_text import without_escapes
from zerofit.core.secrets import is_secret
from zerofit.core.units import GIB
from zerofit.core.validation import parse_known
from zerofit.launching.clusters.job import (
    NODE_MODULE,
    STOP_FILE,
    Rendered,
    check_image,
    job_name,
    launcher_lines,
    yaml_text,
)
from zerofit.launching.clusters.scheduler_options import (
    FLAG,
    SchedulerOption,
    check_not_own,
    parse_options,
    refused,
    unknown_option,
    yaml_value,
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
JOB_ID = re.compile(r"[1-9][0-9]{0,9}")
"""The id of a managed job."""
_SUBMIT_LIMIT_S = 900.0
"""It uploads the work folder, and the first job starts the machine that controls all. ASSUMPTION."""
_JOB_MOUNT = "~/zerofit-job"
_PORT = 29500
_MOST_LISTS = 100
"""Lines that may begin the queue in a client's output. ASSUMPTION."""
_SPEC = re.compile(r"(\d+)x(.+)")
_LEAVE = "leave it out: the run needs the one that zerofit writes"
_OWN = {
    **dict.fromkeys(("name", "run", "file_mounts"), _LEAVE),
    "num_nodes": "use --num-machines",
    "workdir": "run zerofit submit in that folder",
    **dict.fromkeys(("envs", "secrets"), "name variables with --env"),
    "resources": "name its fields: resources.use_spot=true",
    "resources.accelerators": "use --gpus",
    "resources.cpus": "use --cpu-cores",
    "resources.image_id": "use --image",
    "resources.job_recovery": "use --max-requeues, or resources.job_recovery.strategy",
    "resources.job_recovery.max_restarts_on_errors": "use --max-requeues",
    "resources.job_recovery.recover_on_exit_codes": "use --max-requeues",
}
"""Keys that zerofit sets, and what to do instead."""
_MIXED = {"resources", "resources.job_recovery"}
"""Sections of which zerofit sets some keys only."""
_ALTERNATIVES = ("resources.any_of", "resources.ordered")
"""Lists of resources, each of which replaces keys of the job's own."""
_TOP = ("config", "event_callback", "experimental", "inputs", "outputs", "resources", "setup", "volumes")
_RESOURCES = [
    "accelerator_args",
    "any_of",
    "autostop",
    "cloud",
    "disk_size",
    "disk_tier",
    "ephemeral_storage",
    "infra",
    "instance_type",
    "job_recovery",
    "labels",
    "local_disk",
    "max_hourly_cost",
    "memory",
    "network_tier",
    "ordered",
    "ports",
    "priority",
    "priority_class",
    "region",
    "use_spot",
    "volumes",
    "zone",
]
"""sky/utils/schemas.py, get_task_schema and get_resources_schema (0.14)."""


def check(flags: ClusterFlags) -> None:
    """Check the user's names of image and volume, before anything is planned.

    Raises:
        UserError: one is invalid.
    """
    check_image(flags.image)
    _volume(flags)
    _add_options({}, flags)


def _add_options(document: dict[str, Any], flags: ClusterFlags) -> None:
    """Add the user's own keys to a job: "resources.use_spot=true".

    Raises:
        UserError: one is unknown, or zerofit sets it.
    """
    for option in parse_options(flags.options):
        *parents, last = option.name.split(".")
        top, *below = (*parents, last)
        above = (".".join(parents[:depth]) for depth in range(1, len(parents) + 1))
        section = next((name for name in above if name in _OWN and name not in _MIXED), option.name)
        check_not_own(option, {option.name: _OWN[section]} if section in _OWN else {})
        if top not in _TOP or (top == "resources" and below[0] not in _RESOURCES):
            known = (*(f"resources.{name}" for name in _RESOURCES), *_TOP)
            raise unknown_option(option, known, of="a SkyPilot job")
        place = document
        for name in parents:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise refused(str(option), why=f"{name} has a value of its own", fix="set one of the two")
        place[last] = yaml_value(option)
        if option.name in _ALTERNATIVES:
            _check_alternatives(option, place[last])


def _check_alternatives(option: SchedulerOption, choices: Any) -> None:
    for choice in choices if isinstance(choices, list) else [None]:
        if not isinstance(choice, dict):
            raise refused(
                str(option),
                why="it must be a list of resources",
                fix=f"write it as in {FLAG} '{option.name}=[{{infra: aws}}, {{infra: gcp}}]'",
            )
        for key in choice:
            if f"resources.{key}" in _OWN:
                raise refused(
                    str(option), why=f"`zerofit submit` sets {key} itself", fix=_OWN[f"resources.{key}"]
                )


def _check_memory(requested: dict[str, Any], needed_bytes: int) -> None:
    """Check that the job asks for the memory that the plan needs, in GB as SkyPilot's, or for more."""
    found, least = re.fullmatch(r"(\d+)\+?", str(requested["memory"])), math.ceil(needed_bytes / GIB)
    if found is None or int(found[1]) < least:
        raise refused(
            f"resources.memory={requested['memory']}",
            why=f"the plan needs {least} on each node",
            fix=f"ask for at least resources.memory={least}+, or leave it out",
        )


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
    _add_options(document, flags)
    _check_memory(requested, resources.memory_bytes)
    path = submission.folder / "job.sky.yaml"
    words = [word for name in secrets for word in ("--secret", name)]
    return Rendered(
        files={path: "".join(f"# {line}\n" for line in submission.comments) + yaml_text(document)},
        command=("sky", "jobs", "launch", "--yes", "--detach-run", *words, str(path)),
        job_name=str(document["name"]),
        limit_s=_SUBMIT_LIMIT_S,
    )


def _run(submission: Submission) -> list[str]:
    folder = submission.job.run_folder
    launcher = (
        f"{submission.python} -P -m {NODE_MODULE} {_JOB_MOUNT} "
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
    if joint and "://" in bucket and path.startswith("/") and flags.volume.isprintable():
        return bucket, path.rstrip("/")
    raise bad_value(
        "--volume",
        flags.volume,
        why="it must be a bucket and the folder on the nodes",
        fix="write it as in --volume s3://checkpoints:/data",
    )


def job_id_of(output: str) -> str | None:
    """Return the managed job's id from the client's output, "Managed Job ID: 7"; None without one."""
    found = re.search(rf"Job ID: (?:\x1b\[[\d;]*m)*({JOB_ID.pattern})\b", output)
    return found[1] if found else None


def find_command(name: str, namespace: str | None) -> tuple[str, ...]:
    """Return the command that prints all jobs."""
    return state_command("", namespace)


def found_ids(output: str, name: str, folder: Path) -> tuple[str, ...]:
    """Return the ids in that command's output of the jobs of a name."""
    found = (str(job.job_id) for job in _queue(output) if job.job_name == name)
    return tuple(dict.fromkeys(job_id for job_id in found if JOB_ID.fullmatch(job_id)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _QueuedJob:
    """A job in the client's queue; releases differ in which fields may be missing or null."""

    job_id: int | str | None = None
    status: str | None = None
    job_name: str | None = None


def _queue(output: str) -> list[_QueuedJob]:
    """Return the jobs in the output of the queue's command, without those that can't be read."""
    text = without_escapes(output)
    lists = re.finditer(r"^\[", text, re.MULTILINE)  # lines of its server may be around the queue
    for begins in islice(lists, _MOST_LISTS):
        try:
            entries, _ = json.JSONDecoder().raw_decode(text, begins.start())
        except (ValueError, RecursionError):
            continue
        if jobs := [job for job in map(_queued, entries) if job is not None]:
            return jobs
    return []


def _queued(entry: Any) -> _QueuedJob | None:
    try:
        return parse_known(_QueuedJob, json.dumps(entry))
    except ValueError:
        return None


def state_command(job_id: str, namespace: str | None) -> tuple[str, ...]:
    """Return the command that prints the states of all jobs."""
    return ("sky", "jobs", "queue", "--all", "--output", "json")


def state_of(output: str, job_id: str) -> str | None:
    """Return the state in that command's output; None if the job is not in it."""
    return next((job.status for job in _queue(output) if str(job.job_id) == job_id), None)


def cancel_command(job_id: str, namespace: str | None) -> tuple[str, ...]:
    """Return the command that cancels a job."""
    return ("sky", "jobs", "cancel", "--yes", job_id)


def logs_command(job_id: str, namespace: str | None, *, follows: bool) -> tuple[str, ...]:
    """Return the command that prints a job's output."""
    return ("sky", "jobs", "logs", *(() if follows else ("--no-follow",)), job_id)
