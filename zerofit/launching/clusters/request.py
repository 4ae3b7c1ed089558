"""SubmitRequest: what was said of the cluster; Rendered: a job as an engine's own client takes it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerofit.core.plan import Plan
    from zerofit.launching.clusters.job import Job, Resources


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


def yaml_text(*documents: dict[str, Any]) -> str:
    """Return documents as YAML, texts of several lines as they are."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes "|" before such texts."""

    def represent(dumper: Dumper, text: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, represent)
    return str(yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=110))
