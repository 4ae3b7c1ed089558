"""The record of a submitted job: its scheduler's id, or, until that is known, the name to look for."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

from zerofit.core.bounded_read import read_bounded_text
from zerofit.core.errors import UserError
from zerofit.core.validation import parse_known, short_reason
from zerofit.launching.clusters.clients import ENGINES, ClusterEngine, run_client
from zerofit.launching.clusters.kubernetes import is_namespace
from zerofit.launching.run_folder import SUBMITTED_FILE, write_file

_LARGEST_RECORD = 100_000
"""Bytes; a record has some 200. ASSUMPTION."""
LOOK_LIMIT_S = 20.0
"""Time limit for looking for a job after its submission failed. ASSUMPTION."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedJob:
    """A job that was handed to a scheduler."""

    engine: ClusterEngine
    job_id: str | None
    """The scheduler's id; None if its answer is not, or not yet, known."""
    namespace: str | None = None
    """KUBERNETES."""
    name: str | None = None
    """The name under which the scheduler has it; None in records of earlier releases."""
    submitted_at: str | None = None
    """ISO 8601, with the zone."""

    def __post_init__(self) -> None:
        """Check what reaches a client: an id like `--user=root` would be a flag.

        Raises:
            ValueError: a field can't be one.
        """
        pattern = ENGINES[self.engine].JOB_ID
        if self.job_id is not None and not pattern.fullmatch(self.job_id):
            raise ValueError(f"job_id: {self.job_id!r} is no id of a {self.engine.value} job")
        if self.namespace is not None and not is_namespace(self.namespace):
            raise ValueError(f"namespace: {self.namespace!r} can't be one")
        if self.name is not None and (not self.name or self.name.startswith("-")):
            raise ValueError(f"name: {self.name!r} can't be one")
        if self.submitted_at is not None and datetime.fromisoformat(self.submitted_at).tzinfo is None:
            raise ValueError(f"submitted_at: {self.submitted_at!r} has no zone")


def now() -> str:
    """Return the time as it is written into a record."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def write_submitted(folder: Path, job: SubmittedJob) -> None:
    """Record a job in its run folder.

    Raises:
        UserError: the folder is not writable.
    """
    write_file(folder / SUBMITTED_FILE, json.dumps(asdict(job), indent=2) + "\n")


def read_submitted(folder: Path) -> SubmittedJob | None:
    """Return the job of a run folder; None for a run that was not submitted.

    Raises:
        UserError: its record can't be read.
    """
    file = folder / SUBMITTED_FILE
    try:
        return parse_known(SubmittedJob, read_bounded_text(file, most_bytes=_LARGEST_RECORD))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(
            "submitted-file-broken",
            "the job of a run can't be read",
            found=f"{short_reason(error)}   ({file})",
            why="`zerofit submit` writes the job id there",
            fix="follow the job with the scheduler's own client; remove the run folder once it has ended",
        ) from None


def looked_up(job: SubmittedJob, folder: Path, **limit: float) -> SubmittedJob:
    """Return a job with its id, which is asked for by its name if it is unknown; without one if not found.

    Raises:
        UserError: the scheduler can't be asked.
    """
    if job.job_id is not None or job.name is None:
        return job
    scheduler = ENGINES[job.engine]
    output = run_client(scheduler.find_command(job.name, job.namespace), **limit)
    found = scheduler.found_ids(output, job.name, folder)
    if len(found) > 1:
        raise UserError(
            "job-ambiguous",
            "several jobs have the name of this run's",
            found=f"{', '.join(found[:5])}: {job.name}",
            why="the scheduler's answer to its submission did not arrive, so its id is unknown",
            fix=f'write the id of this run\'s into {folder / SUBMITTED_FILE}, as "job_id"',
        )
    return replace(job, job_id=found[0]) if found else job
