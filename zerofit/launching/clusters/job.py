"""Job: what a run's nodes must know beside its plan, what it asks a cluster for, and what a client gets."""

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

from zerofit.core.errors import UserError
from zerofit.core.secrets import is_secret_name
from zerofit.core.units import GIB
from zerofit.core.validation import parse_strictly
from zerofit.scripts.target import script_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerofit.core.plan import Plan

JOB_FILE = "job.json"
STOP_FILE = "stop"
"""Is there, in the run folder, once the scheduler is about to take the nodes back."""
NODE_MODULE = "zerofit.launching.clusters.node"
"""The program that runs once on each node."""
_START_S = 1800
"""ASSUMPTION: half an hour is enough for the start, the data and the checkpoints."""
_SOURCES = 2000
"""Python files beside a script that its digest takes in at most."""
_SHM_SHARE = 0.5
"""Of a node's memory that /dev/shm may hold: Linux's own default for a tmpfs (tmpfs(5))."""
_OF_HOST = (
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LC_\w+|TZ|VIRTUAL_ENV|CONDA_(PREFIX|DEFAULT_ENV)|LD_LIBRARY_PATH|PYTHONPATH"
    r"|CUDA_HOME|HF_HOME|HF_HUB_CACHE|HF_DATASETS_CACHE|XDG_CACHE_HOME|TORCH_(HOME|EXTENSIONS_DIR)"
)
"""Variables with places of this machine: for nodes that share its disks."""
_OF_ALL = (
    r"(HF_(HUB|DATASETS)|TRANSFORMERS)_OFFLINE|(NCCL|GLOO|TORCH_NCCL|OMP)_\w+|PYTORCH(_CUDA)?_ALLOC_CONF"
    r"|WANDB_(MODE|PROJECT)|TOKENIZERS_PARALLELISM"
)
"""Variables that a job takes along wherever it runs. None of either list holds a secret."""
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run on a cluster, as the launcher on each node reads it."""

    run: str
    """The run's name: that of its folder."""
    target: tuple[str, ...]
    """The script or `-m module`, and its arguments."""
    work_dir: str | None
    """Folder in which the script starts; None for the one in which the launcher does."""
    run_folder: str
    """The run folder, on the nodes."""
    engine: str
    """Which scheduler runs it: "slurm", "kubernetes", "skypilot"."""
    num_nodes: int
    code_digest: str
    """Of the script and the Python files beside it when it was submitted; "" where nobody knew them."""
    max_requeues: int
    """How often it may be started again."""
    join_limit_s: float
    """How long the nodes wait for each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Resources that a run asks of each node, and for how long."""

    num_nodes: int
    gpus_per_node: int
    """0 for ranks on the CPU."""
    cores_per_node: int
    memory_bytes: int
    """Host memory of a node."""
    shm_bytes: int
    """Shared memory that NCCL and the DataLoader's workers may take, out of memory_bytes."""
    scratch_bytes: int
    """Bytes offloaded to NVMe on a node; 0 for none."""
    nvme_path: str | None
    wall_time_s: int | None
    """None where the number of steps or their time is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFlags:
    """The user's flags about the cluster."""

    partition: str | None = None
    account: str | None = None
    constraint: str | None = None
    """SLURM: features that the nodes must have: "h100"."""
    wall_time_s: int | None = None
    """How long it may run; None for what the plan predicts."""
    save_time_s: int = 300
    """How long before the end of its time the ranks are told to save."""
    max_requeues: int = 3
    join_limit_s: float | None = None
    """None for the engine's own."""
    image: str | None = None
    """KUBERNETES, SKYPILOT: the container's image, with zerofit and the script."""
    namespace: str | None = None
    """KUBERNETES."""
    node_selector: tuple[str, ...] = ()
    """KUBERNETES: labels that the nodes must have: "nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3"."""
    volume: str | None = None
    """KUBERNETES: CLAIM:PATH, where runs and checkpoints outlive a pod."""
    has_trainer: bool = True
    """KUBERNETES: True if the cluster has Kubeflow Trainer; else a JobSet is made."""
    env: tuple[str, ...] = ()
    """Names of further variables that the job takes from the environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToSubmit:
    """A run as every engine gets it."""

    job: Job
    plan: Plan
    resources: Resources
    flags: ClusterFlags
    folder: Path
    """The run folder here, in which the job's file is to stand."""
    environment: Mapping[str, str] = field(repr=False)
    """The variables that it takes along; those with a secret's name are never written."""
    gpus: str | None
    """The GPUs of a node as they were said: "8xH100"; None where a plan was given."""
    python: str
    """The interpreter on the nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A job as an engine's own client takes it."""

    files: Mapping[Path, str]
    """Text of the files of the run folder, by path."""
    command: tuple[str, ...]
    """Submits it."""
    checks: tuple[tuple[str, ...], ...] = ()
    """Commands of the client that say before whether it can run; they submit nothing."""

    @property
    def command_line(self) -> str:
        """The command for a shell."""
        return shlex.join(self.command)


def resources_of(plan: Plan, *, num_steps: int | None, on_cpu: bool) -> Resources:
    """Return what a plan needs.

    Args:
        on_cpu: True if it is rehearsed without its GPUs: how long that takes nobody predicts.
        num_steps: optimizer steps of the run; None where nobody knows.
    """
    topology, machine, estimate = plan.topology, plan.machine, plan.estimate
    step = None if estimate is None else estimate.step_time
    memory = machine.host_memory_available_bytes
    if estimate is not None:
        memory = math.ceil(estimate.host.peak_bytes * (1 + estimate.host.uncertainty))
    wall_time_s = None
    if num_steps is not None and step is not None and not on_cpu:
        wall_time_s = math.ceil(num_steps * step.seconds * (1 + step.uncertainty)) + _START_S
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
    """Return what a node writes to NVMe: fp32 weights, momentum and variance, and 2 bytes of each parameter.

    Source: deepspeed/runtime/swap_tensor/optimizer_utils.py and partitioned_param_swapper.py. A plan may
    offload less than all of these 14 bytes.
    """
    if not plan.strategy.uses_nvme or plan.estimate is None:
        return 0
    return 14 * plan.estimate.num_trained // plan.topology.num_nodes


def num_steps_of(plan: Plan) -> int | None:
    """Return the optimizer steps of the captured training; None where it does not say."""
    capture = plan.capture
    if capture is None:
        return None
    said = capture.trainer_arguments.get("max_steps") or 0
    if said > 0:
        return int(said)
    return max((one.num_steps for one in capture.schedulers if one.num_steps), default=None)


def launcher_lines(command: str, *, stop_file: str, signal: str) -> list[str]:
    """Return lines of a shell that run the launchers to their end, and have them save on a signal.

    Args:
        command: for the shell; starts this node's launcher, or those of all nodes.
        stop_file: which the launchers look for.
        signal: the scheduler's: "USR1", "TERM".
    """
    return [
        "# The nodes are wanted back: the launchers look for the file, and all ranks save together.",
        f"trap 'touch {shlex.quote(stop_file)}' {signal}",
        f"{command} &",
        "launchers=$!",
        'while wait "$launchers"; code=$?; kill -0 "$launchers" 2>/dev/null; do :; done',
    ]


def job_to_json(job: Job) -> str:
    """Return a job as the text of its file."""
    return json.dumps(dataclasses.asdict(job), indent=2) + "\n"


def job_from_json(text: str, *, name: str) -> Job:
    """Return the job that a file holds.

    Raises:
        UserError: it can't be read.
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
    """Return a digest of a script and of the Python files in and below its folder; "" where none is there."""
    script = Path(script_of(target))
    folder = Path() if target[0] == "-m" else script.parent
    files = sorted(_sources(folder))[:_SOURCES]
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
        found += [Path(place) / name for name in files if name.endswith(".py")]
        if len(found) > _SOURCES:
            break
    return found


def passed_on(environ: Mapping[str, str], named: tuple[str, ...], *, shares_disks: bool) -> tuple[str, ...]:
    """Return the names of the variables that a job gets: those of the list, and those that the user names.

    Args:
        environ: the environment here.
        named: by the user.
        shares_disks: True if the nodes see the disks of this machine.

    Raises:
        UserError: a variable is named that is not set, or that is no name.
    """
    for name in named:
        if not _NAME.fullmatch(name) or name not in environ:
            raise UserError(
                "env-not-set",
                "there is no such variable to pass on",
                found=f"--env {name.partition('=')[0]}",
                why="--env takes the name of a variable that is set here; values are never on a command line",
                fix="export the variable first, and give its name: --env HF_TOKEN",
            )
    pattern = f"{_OF_ALL}|{_OF_HOST}" if shares_disks else _OF_ALL
    listed = [name for name in sorted(environ) if re.fullmatch(pattern, name) and not is_secret_name(name)]
    return tuple(dict.fromkeys((*listed, *named)))


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
                why="DeepSpeed's launchers put its lines, unquoted, into each node's shell, accelerate puts "
                "tokens into it, and a folder from elsewhere can bring it along",
                fix=f"look into it, then remove it: rm {file}; name what a run needs with --env NAME",
            )


def yaml_text(*documents: dict[str, Any]) -> str:
    """Return documents as YAML, texts of several lines as they are."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes "|" before such texts."""

    def represent(dumper: Dumper, text: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, represent)
    return str(yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=110))
