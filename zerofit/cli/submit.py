"""zerofit submit: the flags of a submitted run; zerofit.launching.clusters does the work."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click

from zerofit.cli.help_groups import GroupedVerb
from zerofit.cli.launch_lines import launch_line_options, resolve_line_flags
from zerofit.cli.options import (
    check_script_flags,
    field_options,
    num_processes_option,
    script_options,
    settings_from,
    trust_option,
)
from zerofit.cli.output.console import Console, echo, show_files
from zerofit.cli.parameters import CONTEXT, Parsed, Word, number_option
from zerofit.cli.plan_options import machine_options, model_options
from zerofit.cli.shared_options import capture_limit_option, json_option
from zerofit.launching.clusters.clients import ClusterEngine
from zerofit.launching.clusters.job import ClusterFlags
from zerofit.launching.clusters.submit import SubmittedRun
from zerofit.launching.clusters.submit import submit as submit_script

_TIME = re.compile(r"(?:(\d+)-)?(\d+):(\d\d)(?::(\d\d))?")
"""Two numbers without days are refused: Slurm reads minutes and seconds, people hours and minutes."""


def _wall_time_s(text: str) -> int:
    """Return the seconds of a time limit: minutes, or Slurm's D-HH:MM and HH:MM:SS."""
    if text.isdecimal() and int(text):
        return 60 * int(text)
    found = _TIME.fullmatch(text)
    if found is None or (found[1] is None and found[4] is None):
        raise ValueError(text)
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


_WALL_TIME = Parsed(
    "time",
    _wall_time_s,
    why="it must be a number of minutes, HH:MM:SS or D-HH:MM, as for sbatch",
    fix="write it as in --time 12:00:00",
)


@click.command(
    cls=GroupedVerb,
    context_settings={**CONTEXT, "allow_interspersed_args": False},
    groups={
        "Cluster": (
            "on",
            "partition",
            "account",
            "wall_time_s",
            "image",
            "namespace",
            "volume",
            "env",
            "options",
        ),
        "Machine": ("num_nodes", "gpus", "on_cpu"),
    },
)
@click.option(
    "--on",
    type=Word("scheduler", ClusterEngine),
    help="slurm, kubernetes or skypilot (required).",
)
@number_option(
    "--num-machines",
    "--nnodes",
    "num_nodes",
    help="Number of nodes; default: 1, or the plan's.",
)
@machine_options(gpus="GPUs of each node, such as 8xH100.")
@click.option("--plan", type=click.Path(path_type=Path), help="Use a plan file.")
@click.option("--cpu", "on_cpu", is_flag=True, help="Test the plan on the CPUs of the nodes.")
@click.option("--partition", metavar="NAME", help="Slurm's partition.")
@click.option("--account", metavar="NAME", help="Slurm's account.")
@click.option("--constraint", metavar="FEATURES", help="Features of Slurm's nodes, such as h100.")
@click.option(
    "--time",
    "wall_time_s",
    type=_WALL_TIME,
    metavar="MINUTES|HH:MM:SS|D-HH:MM",
    help="Time limit; default: what the plan predicts.",
)
@number_option(
    "--save-time",
    "save_time_s",
    metavar="SECONDS",
    default=300,
    help="How long before the time limit the ranks save a checkpoint and end.",
)
@number_option(
    "--max-requeues",
    metavar="N",
    least=0,
    default=3,
    help="How many times the run may be restarted, after a time limit or a lost node.",
)
@number_option(
    "--join-limit",
    "join_limit_s",
    metavar="SECONDS",
    help="How long nodes wait for each other; 40 on Slurm, 900 elsewhere, where images are pulled first.",
)
@click.option("--image", metavar="IMAGE", help="Container with zerofit and SCRIPT.")
@click.option("--namespace", metavar="NAME", help="Kubernetes' namespace.")
@click.option(
    "--node-selector",
    metavar="LABEL=VALUE",
    multiple=True,
    help="Label of Kubernetes' nodes, such as nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3.",
)
@click.option("--volume", metavar="CLAIM:PATH", help="Kubernetes' volume for runs and checkpoints.")
@click.option(
    "--job-set", is_flag=True, help="On Kubernetes a JobSet, for clusters without Kubeflow Trainer."
)
@click.option("--env", metavar="NAME", multiple=True, help="Another variable for the job, such as HF_TOKEN.")
@click.option(
    "--scheduler-option",
    "options",
    metavar="NAME=X",
    multiple=True,
    help="Option of the scheduler, as in qos=high; repeatable.",
)
@trust_option
@click.option("--write-only", is_flag=True, help="Write the run folder with the job, and submit nothing.")
@model_options
@field_options
@num_processes_option
@launch_line_options
@capture_limit_option
@json_option
@script_options(dry_run="Print what would be submitted, and submit nothing.", has_quiet=False)
def submit(
    script: str,
    script_args: tuple[str, ...],
    module: bool,
    dry_run: bool,
    write_only: bool,
    is_checked: bool,
    console: Console,
    job_set: bool,
    as_json: bool,
    **flags: Any,
) -> int:
    """Plan SCRIPT here, and submit its run to a cluster.

    SCRIPT runs here up to its first training step, unless --model names what it trains; no GPU is needed.
    Nodes, GPUs, cores, memory and time are requested as the plan needs them. Flags before SCRIPT are
    zerofit's, all after it the script's.
    """
    check_script_flags(script, script_args)
    if flags["on"] is None:  # which may stand behind the script
        needs_gpus = not (flags["gpus"] or flags["plan"])
        raise click.MissingParameter(
            param_hint="'--on' and '--gpus' (or '--plan')" if needs_gpus else "'--on'", param_type="option"
        )
    if dry_run and write_only:
        raise click.UsageError("--dry-run writes nothing, and --write-only the run folder: leave one out")
    cluster = {name: flags.pop(name) for name in ClusterFlags.__dataclass_fields__ if name in flags}
    run = submit_script(
        script,
        *script_args,
        module=module,
        is_checked=is_checked,
        dry_run=dry_run,
        write_only=write_only,
        observer=console,
        cluster=ClusterFlags(**cluster, has_trainer=not job_set),
        ranks_per_node=resolve_line_flags(flags),
        **settings_from(flags),
    )
    if as_json:
        echo(json.dumps(_document(run), indent=2))
    elif run.is_written:
        echo(run.job_id or run.command)
    else:
        show_files(run.files)
        echo("# nothing was written: --write-only writes these files, and this command submits the job:")
        echo(run.command)
    return 0


def _document(run: SubmittedRun) -> dict[str, Any]:
    """Return what `zerofit submit --json` prints."""
    return {
        "job_id": run.job_id,
        "folder": str(run.folder),
        "is_written": run.is_written,
        "command": run.command,
        "wall_time_s": run.wall_time_s,
        "time": run.time.as_json(),
        "files": {str(path): text for path, text in run.files.items() if path.suffix != ".json"},
    }
