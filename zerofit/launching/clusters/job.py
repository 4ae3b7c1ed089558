"""Job: a run's launch on each node, its resource requests, and the input of a scheduler's client."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError, bad_value
from zerofit.core.secrets import is_secret
from zerofit.core.units import GIB
from zerofit.core.validation import parse_strictly
from zerofit.scripts.target import script_path

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerofit.core.plan import Plan

JOB_FILE = "job.json"
STOP_FILE = "stop"
"""Created in the run folder when the scheduler is about to reclaim the nodes."""
NODE_MODULE = "zerofit.launching.clusters.node"
"""The program that runs once per node."""
CLIENT_LIMIT_S = 60.0
"""Time limit for a scheduler's client. ASSUMPTION."""
_MAX_SOURCES = 2000
"""Maximum number of Python files beside a script in its digest."""
_SHM_SHARE = 0.5
"""Share of a node's memory for /dev/shm: Linux's default for tmpfs (tmpfs(5))."""
_DATA_BYTES = 2 * GIB
"""Host memory of a rank for its dataset and DataLoader workers, which no estimate has. ASSUMPTION."""
_HOST_VARIABLES = (
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LC_\w+|TZ|VIRTUAL_ENV|CONDA_(PREFIX|DEFAULT_ENV)|LD_LIBRARY_PATH|PYTHONPATH"
    r"|CUDA_HOME|HF_HOME|HF_HUB_CACHE|HF_DATASETS_CACHE|XDG_CACHE_HOME|TORCH_(HOME|EXTENSIONS_DIR)"
)
"""Variables with paths of this machine, for nodes that share its disks."""
_COMMON_VARIABLES = (
    r"(HF_(HUB|DATASETS)|TRANSFORMERS)_OFFLINE|(NCCL|GLOO|TORCH_NCCL|OMP)_\w+|PYTORCH(_CUDA)?_ALLOC_CONF"
    r"|WANDB_(MODE|PROJECT)|TOKENIZERS_PARALLELISM"
)
"""Variables passed to every job. Neither list contains secrets."""
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run on a cluster, read by the launcher on each node."""

    run: str
    """The run's name: the name of its folder."""
    target: tuple[str, ...]
    """The script or `-m module`, and its arguments."""
    work_dir: str | None
    """Working folder of the script; None for the launcher's."""
    run_folder: str
    """The run folder, on the nodes."""
    engine: str
    """The scheduler: "slurm", "kubernetes", "skypilot"."""
    num_nodes: int
    code_digest: str
    """Of the script and the Python files beside it at submission; "" if unknown."""
    max_requeues: int
    """Maximum number of restarts."""
    join_limit_s: float
    """How long the nodes wait for each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Resources requested per node, and the run time."""

    num_nodes: int
    gpus_per_node: int
    """0 for ranks on the CPU."""
    cores_per_node: int
    memory_bytes: int
    """Host memory of a node."""
    shm_bytes: int
    """Shared memory for NCCL and DataLoader workers, included in memory_bytes."""
    scratch_bytes: int
    """Bytes offloaded to NVMe per node; 0 for none."""
    nvme_path: str | None
    wall_time_s: int | None
    """None if the number of steps or their time is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFlags:
    """The user's flags for the cluster."""

    partition: str | None = None
    account: str | None = None
    constraint: str | None = None
    """SLURM: required node features: "h100"."""
    wall_time_s: int | None = None
    """Time limit; None for the plan's prediction."""
    save_time_s: int = 300
    """How long before the time limit the ranks are told to save."""
    max_requeues: int = 3
    join_limit_s: float | None = None
    """None for the scheduler's default."""
    image: str | None = None
    """KUBERNETES, SKYPILOT: the container image, with zerofit and the script."""
    namespace: str | None = None
    """KUBERNETES."""
    node_selector: tuple[str, ...] = ()
    """KUBERNETES: required node labels: "nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3"."""
    volume: str | None = None
    """KUBERNETES: CLAIM:PATH of a volume for runs and checkpoints, which outlives the pods."""
    has_trainer: bool = True
    """KUBERNETES: True to use Kubeflow Trainer; else a JobSet is created."""
    env: tuple[str, ...] = ()
    """Names of further environment variables to pass to the job."""
    options: tuple[str, ...] = ()
    """The scheduler's own: "qos=high" on SLURM; "tolerations=[...]" or "annotations.KEY=TEXT" on KUBERNETES;
    "resources.use_spot=true" on SKYPILOT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A run to submit, for any scheduler."""

    job: Job
    plan: Plan
    resources: Resources
    flags: ClusterFlags
    folder: Path
    """The local run folder, for the job's file."""
    environment: Mapping[str, str] = field(repr=False)
    """The variables passed to the job; those with a secret's name are never written."""
    gpus: str | None
    """The GPUs of a node as the user gave them: "8xH100"; None if a plan was given."""
    python: str
    """The interpreter on the nodes."""
    comments: tuple[str, ...] = ()
    """Lines for the head of the job's file: the derivation of its time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A job in the format of a scheduler's client."""

    files: Mapping[Path, str]
    """Texts of the run folder's files, by path."""
    command: tuple[str, ...]
    """Submits it."""
    job_name: str
    """The name under which the scheduler will have it: with its kind on KUBERNETES."""
    checks: tuple[tuple[str, ...], ...] = ()
    """Client commands that check in advance whether it can run; they submit nothing."""
    limit_s: float = CLIENT_LIMIT_S
    """Time limit of submitting."""
    warnings: tuple[str, ...] = ()
    """For the user, one sentence each."""


def job_name(run: str) -> str:
    """Return a run's name as one of a job: lower-case letters, digits and "-", a letter first."""
    return f"zf-{re.sub('[^a-z0-9]+', '-', run.lower())}".strip("-")


def resources_of(plan: Plan, *, wall_time_s: int | None, on_cpu: bool) -> Resources:
    """Return the resources that a plan needs.

    Args:
        plan: of the run.
        wall_time_s: the run's predicted time; None if unknown.
        on_cpu: True for a test without GPUs.
    """
    topology, machine, estimate = plan.topology, plan.machine, plan.estimate
    memory = machine.host_memory_available_bytes
    if estimate is not None:
        needed = math.ceil(estimate.host.upper_bytes)
        memory = max(needed, min(needed + topology.ranks_per_node * _DATA_BYTES, memory))
    return Resources(
        num_nodes=topology.num_nodes,
        gpus_per_node=0 if on_cpu else topology.ranks_per_node,
        cores_per_node=machine.num_cpu_cores,
        memory_bytes=max(GIB, memory),
        shm_bytes=int(_SHM_SHARE * max(GIB, memory)),
        scratch_bytes=_offloaded_bytes(plan),
        nvme_path=plan.strategy.nvme_path if plan.strategy.uses_nvme else None,
        wall_time_s=wall_time_s,
    )


def _offloaded_bytes(plan: Plan) -> int:
    """Return a node's NVMe bytes: fp32 weights, momentum and variance, and 2 bytes per parameter.

    Source: deepspeed/runtime/swap_tensor/optimizer_utils.py and partitioned_param_swapper.py. A plan may
    offload less than all of these 14 bytes.
    """
    if not plan.strategy.uses_nvme or plan.estimate is None:
        return 0
    return 14 * plan.estimate.num_trained // plan.topology.num_nodes


def launcher_lines(command: str, *, stop_file: str, signal: str) -> list[str]:
    """Return shell lines that run the launchers to their end, and make them save on a signal.

    Args:
        command: shell command that starts this node's launcher, or those of all nodes.
        stop_file: the file that the launchers watch for.
        signal: the scheduler's: "USR1", "TERM".
    """
    return [
        "# Before the nodes are taken away, the launchers see this file, and all ranks save a checkpoint.",
        f"trap {shlex.quote(f'touch {shlex.quote(stop_file)}')} {signal}",
        f"{command} &",
        "launchers=$!",
        'while wait "$launchers"; code=$?; kill -0 "$launchers" 2>/dev/null; do :; done',
    ]


def job_to_json(job: Job) -> str:
    """Return a job as the text of its file."""
    return json.dumps(dataclasses.asdict(job), indent=2) + "\n"


def job_from_json(text: str, *, name: str) -> Job:
    """Return the job in a file's text.

    Raises:
        UserError: it can't be parsed.
    """
    from pydantic import ValidationError

    try:
        return parse_strictly(Job, text)
    except ValidationError as error:
        raise UserError(
            "job-file-broken",
            "the job file can't be read",
            found=f"{error.errors()[0]['msg']}   ({name})",
            why="`zerofit submit` writes it, and each node reads it",
            fix="submit the run again, with the same version of zerofit here and on the nodes",
        ) from None


def code_digest(target: tuple[str, ...]) -> str:
    """Return a digest of a script and of the Python files in and below its folder; "" if there are none."""
    script = script_path(target)
    folder = Path() if script is None else Path(script).parent
    files = sorted(_sources(folder))[:_MAX_SOURCES]
    if not files:
        return ""
    digest = hashlib.sha256()
    for file in files:
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _sources(folder: Path) -> list[Path]:
    found: list[Path] = []
    for place, folders, files in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if not name.startswith((".", "__pycache__", "zerofit-runs", "venv", "node_modules"))
            and not (Path(place) / name / "pyvenv.cfg").exists()
        ]
        paths = (Path(place) / name for name in files if name.endswith(".py"))
        found += [path for path in paths if path.is_file()]  # an editor's lock is a link to nothing
        if len(found) > _MAX_SOURCES:
            break
    return found


def variables_to_pass(
    environ: Mapping[str, str], named: tuple[str, ...], *, shares_disks: bool
) -> tuple[str, ...]:
    """Return the names of the variables passed to a job: the default ones, and those named by the user.

    Args:
        environ: the local environment.
        named: by the user.
        shares_disks: True if the nodes share this machine's disks.

    Raises:
        UserError: a named variable is not set, or not a valid name.
    """
    for name in named:
        if not _NAME.fullmatch(name) or name not in environ:
            raise UserError(
                "env-not-set",
                "the variable to pass on is not set",
                found=f"--env {name.partition('=')[0]}",
                why="--env needs the name of a variable that is set here; values must not be on a command "
                "line",
                fix="export the variable first, and pass its name: --env HF_TOKEN",
            )
    pattern = f"{_COMMON_VARIABLES}|{_HOST_VARIABLES}" if shares_disks else _COMMON_VARIABLES
    listed = [
        name
        for name, value in sorted(environ.items())
        if re.fullmatch(pattern, name) and not is_secret(name, value)
    ]
    return tuple(dict.fromkeys((*listed, *named)))


def check_image(image: str | None) -> None:
    """Check the name of a container image.

    Raises:
        UserError: it can't be one.
    """
    if image is not None and not re.fullmatch(r"[\w.:/@-]+", image):
        raise bad_value(
            "--image",
            image,
            why="it must be an image's name, as a registry has it",
            fix="write it as in --image registry.example/train:1",
        )


def check_no_deepspeed_env(*folders: Path) -> None:
    """Check that no file sets variables for DeepSpeed's launchers.

    Raises:
        UserError: there is one.
    """
    for folder in folders:
        file = folder / ".deepspeed_env"
        if file.exists():
            raise UserError(
                "deepspeed-env-file",
                "a file sets variables on every node",
                found=str(file),
                why="DeepSpeed's launchers run its lines, unquoted, in each node's shell, accelerate "
                "writes tokens into it, and it may come with a foreign folder",
                fix=f"check it, then remove it: rm {file}; pass needed variables with --env NAME",
            )


def yaml_text(*documents: dict[str, Any]) -> str:
    """Return documents as YAML, with multi-line strings as blocks."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes multi-line strings as "|" blocks."""

    def represent(dumper: Dumper, text: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, represent)
    return str(yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=110))
