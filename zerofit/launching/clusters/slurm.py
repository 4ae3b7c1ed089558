"""Slurm: a run as an sbatch script, and its clients' commands."""

from __future__ import annotations

import math
import re
import shlex
from typing import TYPE_CHECKING

from zerofit.core.errors import UserError, bad_value
from zerofit.core.units import GIB, MIB
from zerofit.launching.clusters.job import NODE_MODULE, STOP_FILE, Rendered, launcher_lines
from zerofit.launching.clusters.sbatch_options import parse_sbatch_options, replaced_by, unknown_to_sbatch
from zerofit.launching.diagnose import EXIT_STOPPED

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from zerofit.launching.clusters.job import ClusterFlags, Submission

JOIN_LIMIT_S = 40.0
"""Slurm starts all nodes of a job together. With the checks, an error is reported within a minute."""
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL")
"""Final states of a job (squeue(1), JOB STATE CODES)."""
CLIENT = "sbatch"
NO_SUCH_JOB = "Invalid job id"
"""Messages of the clients for a job that Slurm has forgotten (slurm/src/common/slurm_errno.c)."""
_LOWEST_PORT, _NUM_PORTS = 20000, 20000
"""Jobs on the same node must not share a port: it is derived from the job id."""
_FAREWELL_S = 60
"""How long srun waits for the other nodes after one has ended; they agree on the cause before."""
_WORD = re.compile(r"[A-Za-z0-9][\w.,:@+-]*")
JOB_ID = re.compile(r"[1-9][0-9]{0,9}")
"""A job id (slurm/slurm.h: 32 bits); clients would take anything else for a flag or for other jobs."""
_STATE = re.compile(rf"({JOB_ID.pattern}) ([A-Z][A-Z_]*)(?: (\S.*))?")
"""A line of the command that prints a job's state."""
_PRINTED_ID = re.compile(rf"(?:Submitted batch job )?({JOB_ID.pattern})(?:;[\w.-]+)?(?: on cluster \S+)?")
"""Of `sbatch --parsable`; a site's wrapper may drop the flag, and print more lines."""


def render(submission: Submission) -> Rendered:
    """Return the sbatch script, and the command that submits it."""
    path = submission.folder / "job.sbatch"
    own = parse_sbatch_options(submission.flags.options, resources=submission.resources)
    options, replaced = _options(submission), replaced_by(own)
    kept = {name: value for name, value in options.items() if value is not None and name not in replaced}
    notes = (
        f"--{replaced[name]} of --scheduler-option replaces --{name}={value}"
        for name, value in options.items()
        if value is not None and name in replaced
    )
    return Rendered(
        files={path: _script(submission, kept | own)},
        command=("sbatch", "--parsable", str(path)),
        job_name=str((kept | own)["job-name"]),
        checks=(("sbatch", "--test-only", str(path)),),
        warnings=(*notes, *unknown_to_sbatch(own)),
    )


def _options(submission: Submission) -> dict[str, object]:
    """Return zerofit's own options of sbatch; those whose value is None are left out."""
    job, flags, resources = submission.job, submission.flags, submission.resources
    return {
        "job-name": f"zerofit-{_without_specials(job.run)}",
        "nodes": resources.num_nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": resources.gpus_per_node or None,
        "cpus-per-task": resources.cores_per_node,
        "mem": f"{math.ceil(resources.memory_bytes / GIB)}G",
        "tmp": f"{math.ceil(resources.scratch_bytes / MIB)}M" if resources.scratch_bytes else None,
        "time": _minutes(flags.wall_time_s or resources.wall_time_s),
        "signal": f"B:USR1@{flags.save_time_s}",
        "partition": flags.partition,
        "constraint": flags.constraint,
        "account": flags.account,
        "chdir": job.work_dir,
        "output": f"{job.run_folder.replace('%', '%%')}/slurm-%j.out",
        "open-mode": "append",
        "export": ",".join(submission.environment) or "NIL",
    }


def _script(submission: Submission, options: Mapping[str, object]) -> str:
    """Return the sbatch script; an option whose value is None takes none."""
    job, resources, folder = submission.job, submission.resources, submission.job.run_folder
    lines = [
        f"#SBATCH --{name}" + ("" if value is None else f"={_quoted(value)}")
        for name, value in options.items()
    ]
    requeue = "--requeue" if job.max_requeues else "--no-requeue"
    launcher = f"{shlex.quote(submission.python)} -P -m {NODE_MODULE} {shlex.quote(folder)}"
    node = shlex.quote(f'exec {launcher} --node "$SLURM_NODEID" --address "$0" --port "$1"')
    return "\n".join(
        [
            "#!/bin/bash",
            "# Written by `zerofit submit`; values of variables are not in it, only their names.",
            *(f"# {line}" for line in submission.comments),
            *lines,
            f"#SBATCH {requeue}",
            "set -u",
            'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            f"port=$(({_LOWEST_PORT} + SLURM_JOB_ID % {_NUM_PORTS}))",
            "# SIGTERM is not trapped: scancel sends it too, and a cancelled job must not be requeued.",
            "# One launcher a node; SLURM_NODEID is known only inside the step, so it is read there.",
            *launcher_lines(
                f"srun --ntasks-per-node=1 --cpus-per-task={resources.cores_per_node} --kill-on-bad-exit=0 "
                f'--wait={_FAREWELL_S} \\\n  bash -c {node} "$first" "$port"',
                stop_file=f"{folder}/{STOP_FILE}",
                signal="USR1",
            ),
            *(_requeued(job.max_requeues) if job.max_requeues else ()),
            'exit "$code"',
            "",
        ]
    )


def _requeued(most: int) -> tuple[str, ...]:
    """Return shell lines that requeue the job after it was told to stop, at most `most` times."""
    return (
        f'if [ "$code" -eq {EXIT_STOPPED} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {most} ]',
        "then",
        '  scontrol requeue "$SLURM_JOB_ID"',
        "fi",
    )


def _minutes(seconds: int | None) -> int | None:
    """Return a time in sbatch's unit: whole minutes."""
    return None if seconds is None else max(1, math.ceil(seconds / 60))


def _without_specials(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)


def _quoted(value: object) -> str:
    """Return a value for an #SBATCH line, which sbatch splits like a shell, without expansion."""
    text = str(value)
    return text if re.fullmatch(r"[\w./:@%,+=-]+", text) else '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def check_folders(*folders: Path) -> None:
    """Check that sbatch can read the folders of a job, each on its own line.

    Raises:
        UserError: one has a line break or another control character in its name.
    """
    for folder in folders:
        if re.search(r"[\x00-\x1f\x7f]", str(folder)):
            raise UserError(
                "folder-unprintable",
                "a job's folder has a character that sbatch can't read",
                found=repr(str(folder)),
                why="an option of a job ends with its line",
                fix="work in a folder with another name, or set --run-dir",
            )


def check(flags: ClusterFlags) -> None:
    """Check the user's names of partition, account and features, before anything is planned.

    Raises:
        UserError: one is invalid.
    """
    for flag, name in (("--partition", flags.partition), ("--account", flags.account)):
        if name is not None and not _WORD.fullmatch(name):
            raise bad_value(
                flag,
                name,
                why="names in Slurm have letters, digits and . , : @ + - _",
                fix="see `sinfo` for the partitions, `sacctmgr show account` for the accounts",
            )
    if flags.constraint is not None and not re.fullmatch(r"[\w&|*.,:@+()\[\]-]+", flags.constraint):
        raise bad_value(
            "--constraint",
            flags.constraint,
            why="it must be node features, joined by & or |",
            fix="`sinfo --format='%N %f %G'` lists the nodes' features",
        )
    parse_sbatch_options(flags.options)


def job_id_of(output: str) -> str | None:
    """Return the job id in the output of `sbatch --parsable`, "123" or "123;cluster"; None without one."""
    found = [match[1] for line in output.splitlines() if (match := _PRINTED_ID.fullmatch(line.strip()))]
    return found[-1] if found else None


def find_command(name: str, namespace: str | None) -> tuple[str, ...]:
    """Return the command that lists the jobs of a name, each with its script."""
    return ("squeue", "--noheader", "--states=all", "--format=%A %o", f"--name={name}")


def found_ids(output: str, name: str, folder: Path) -> tuple[str, ...]:
    """Return the ids in that command's output of the jobs that run a folder's script."""
    found, own = [], str(folder.resolve() / "job.sbatch")
    for line in output.splitlines():
        job_id, _, script = line.strip().partition(" ")
        if JOB_ID.fullmatch(job_id) and script.strip() in ("", own):
            found.append(job_id)
    return tuple(dict.fromkeys(found))


def state_command(job_id: str, namespace: str | None) -> tuple[str, ...]:
    """Return the command that prints a job's id, state and reason.

    Not `scontrol show job`, which prints them beside the job's name, comment and command: these may have any
    text, such as "JobState=COMPLETED".
    """
    return ("squeue", "--noheader", "--states=all", "--format=%A %T %r", f"--jobs={job_id}")


def state_of(output: str, job_id: str) -> str | None:
    """Return the state in that command's output, with the reason if pending; None if there is none."""
    for line in output.splitlines():
        found = _STATE.fullmatch(line.strip())
        if found is not None and found[1] == job_id:
            return found[2] if found[3] in (None, "None") else f"{found[2]} ({found[3]})"
    return None


def cancel_command(job_id: str, namespace: str | None) -> tuple[str, ...]:
    """Return the command that cancels a job."""
    return ("scancel", job_id)


def run_folder(folder: Path, flags: ClusterFlags) -> str:
    """Return the run folder on the nodes: the same one, on a shared disk."""
    return str(folder)
