"""Status, output and cancellation of started or submitted runs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.bounded_read import open_regular
from zerofit.core.errors import UserError, nearest
from zerofit.core.foreign_text import printable
from zerofit.core.processes import is_running
from zerofit.core.rank_observation import Phase, RankObservation, read_observation
from zerofit.launching.clusters.clients import ENGINES, ClusterEngine, check_client, run_client
from zerofit.launching.clusters.job import JOB_FILE
from zerofit.launching.clusters.pace import last_loss, pace, pace_words, started_at
from zerofit.launching.clusters.submitted import SubmittedJob, looked_up, read_submitted, write_submitted
from zerofit.launching.diagnose import describe
from zerofit.launching.run_folder import (
    TRIALS_PREFIXES,
    UNREADABLE,
    RunRecord,
    attempts,
    document_in,
    launchers,
    run_record,
    typed_name,
    was_killed,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_LIVE = re.compile(r"rank(\d{1,6})\.live")
_BLOCK_BYTES = 1 << 20
_POLL_S = 0.5
_ASK_EVERY_S = 10.0
"""How often a scheduler is queried while a log is followed."""
_FORGOTTEN = "no longer known to the scheduler"
NOT_FOUND = "not found by its name"
"""State of a job whose submission was not answered."""
_ON_ITS_WAY = timedelta(hours=1)
"""How long a job whose submission was not answered may take to appear in the queue. ASSUMPTION."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedRun:
    """A run's folder, and its job."""

    folder: Path
    job: SubmittedJob | None = None
    """None for a run on this machine."""

    @property
    def engine(self) -> ClusterEngine | None:
        """The scheduler that it was submitted to; None for a run on this machine."""
        return None if self.job is None else self.job.engine

    @property
    def attempt(self) -> Path:
        """The folder of the last start."""
        return [path for path in attempts(self.folder) if path == self.folder or (path / "ranks").exists()][
            -1
        ]

    @property
    def is_only_written(self) -> bool:
        """True for a job of `zerofit submit --write-only` that has not started."""
        has_job = (self.folder / JOB_FILE).exists() and self.engine is None
        return has_job and not ((self.folder / "ranks").exists() or launchers(self.folder))

    @property
    def scheduler(self) -> ClusterEngine | None:
        """The scheduler that it was submitted to, or written for; None on this machine."""
        written_for = document_in(self.folder / JOB_FILE).get("engine")
        return self.engine or next((engine for engine in ClusterEngine if engine == written_for), None)

    @property
    def record(self) -> RunRecord | None:
        """run.json of the last start; None while it runs."""
        return run_record(self.attempt / "run.json")

    @property
    def _is_recent(self) -> bool:
        """True if a job may still be on its way to the scheduler's queue."""
        if self.job is None or self.job.submitted_at is None:
            return False
        age = datetime.now().astimezone() - datetime.fromisoformat(self.job.submitted_at)
        return age < _ON_ITS_WAY

    def scheduler_state(self) -> str | None:
        """Return the scheduler's state of the run; None on this machine, or if the client can't tell.

        Raises:
            UserError: its client is missing, or can't reach it.
        """
        if self.job is None:
            return None
        job, module = self.job, ENGINES[self.job.engine]
        if job.job_id is None:
            return NOT_FOUND if self._is_recent else _FORGOTTEN
        try:
            output = run_client(module.state_command(job.job_id, job.namespace))
            state: str | None = module.state_of(output, job.job_id)
        except UserError as error:
            if not _is_forgotten(module, error):
                raise
            return _FORGOTTEN
        return state


def _is_forgotten(module: Any, error: UserError) -> bool:
    """Return True if a scheduler's client reports that there is no such job."""
    return module.NO_SUCH_JOB is not None and module.NO_SUCH_JOB in error.found


def find_run(name: str | None, runs: Path) -> FollowedRun:
    """Return a run by its folder or the folder's name; the newest if none is given.

    Raises:
        UserError: there is no such run.
    """
    folders = [entry.name for entry in runs.iterdir() if entry.is_dir()] if runs.is_dir() else []
    known = sorted(name for name in folders if not name.startswith(TRIALS_PREFIXES))
    folder = Path(name) if name and Path(name).is_dir() else runs / (name or (known[-1] if known else ""))
    if not (folder / "plan.json").is_file():
        near = nearest(name, known) if name else None
        raise UserError(
            "run-missing",
            "there is no such run",
            found=name or f"no run in {runs}",
            why=f"no run folder {'of that name ' if name else ''}in {runs.resolve()}",
            fix=f"did you mean {near}?" if near else _where_runs_are(name),
        )
    return followed_run(folder)


def _where_runs_are(name: str | None) -> str:
    """Return how a user names a run that was not found."""
    if name:
        return "name a run's folder, or its parent with --run-dir"
    return "go to the folder where it was launched, or name the runs' folder with --run-dir"


def followed_run(folder: Path) -> FollowedRun:
    """Return the run of a folder.

    Raises:
        UserError: its submitted.json can't be read.
    """
    return FollowedRun(folder=folder, job=read_submitted(folder))


def with_job_id(run: FollowedRun) -> FollowedRun:
    """Return a run with its job's id, which is looked for, and recorded, if its submission was not answered.

    Raises:
        UserError: its scheduler can't be queried.
    """
    if run.job is None:
        return run
    job = looked_up(run.job, run.folder)
    if job != run.job:
        with contextlib.suppress(UserError):  # of another user's folder
            write_submitted(run.folder, job)
    return replace(run, job=job)


def run_status(run: FollowedRun) -> dict[str, Any]:
    """Return the status of a run, as `zerofit runs status --json` prints it; None where it is unknown.

    Times are ISO 8601 with their zone.

    Raises:
        UserError: its scheduler can't be queried.
    """
    run = with_job_id(run)
    record, ranks = run.record, _ranks(run)
    state = run.scheduler_state()
    slowest = min(ranks.values(), key=lambda rank: rank.step, default=None)
    has_ended, end, cause = _is_over(run, state), None, record and record.cause
    if record is UNREADABLE:
        end = f"unknown: {UNREADABLE.cause}"
    elif record is not None:
        at = "" if record.ended_at is None else f"{record.ended_at}, "
        end = f"{at}exit code {record.exit_code}: {record.cause or 'ended well'}"
    elif run.is_only_written:
        shows = "it has not started"
        if run.scheduler in (ClusterEngine.KUBERNETES, ClusterEngine.SKYPILOT):  # its records are elsewhere
            shows = f"{ENGINES[run.scheduler].CLIENT} tells if it runs"
        end = f"written with --write-only; {shows}"
    elif has_ended:
        gone = "its launcher left no record" if run.engine is None else f"its job is {state}"
        end = cause = (run.engine is None and was_killed(run.folder)) or f"unknown: {gone}"
    return {
        "folder": str(run.folder),
        "scheduler": run.scheduler and run.scheduler.value,
        "job_id": run.job and run.job.job_id,
        "scheduler_state": state,
        "submitted_at": run.job and run.job.submitted_at,
        "started_at": started_at(run.folder),
        "ended_at": record and record.ended_at,
        "num_starts": (not run.is_only_written) + sum(1 for _ in run.folder.glob("requeue-*/ranks")),
        "num_ranks": len(ranks),
        "step": slowest and slowest.step,
        **pace(run.folder, slowest, is_running=not has_ended),
        "loss": last_loss(run.attempt / "logs" / "rank0.log"),
        "doing": describe(slowest) if slowest and slowest.phase is not Phase.ENDED else None,
        "checkpoint": next((rank.checkpoint for rank in ranks.values() if rank.checkpoint), None),
        "is_running": not has_ended,
        "exit_code": None if record is UNREADABLE else record and record.exit_code,
        "cause": cause,
        "kind": record and record.kind,
        "end": end,
    }


def status_lines(run: FollowedRun) -> list[str]:
    """Return the status of a run in a few lines."""
    status = run_status(run)
    lines = [f"run:    {run.folder}"]
    if run.engine is not None:
        state = status["scheduler_state"] or "of unknown state"
        lines.append(f"job:    {status['job_id'] or 'of unknown id'} on {run.engine.value}, {state}")
    if status["num_starts"] > 1:
        lines.append(f"starts: {status['num_starts']}")
    if status["num_ranks"]:
        of = f" of {status['num_steps']}" if status["num_steps"] else ""
        doing = f", {status['doing']}" if status["doing"] else ""
        lines.append(f"ranks:  {status['num_ranks']}, step {status['step']}{of}{doing}")
        if words := pace_words(status):
            lines.append(f"pace:   {words}")
        if status["checkpoint"]:
            lines.append(f"saved:  {status['checkpoint']}")
    if status["end"] or run.engine is None:
        lines.append(f"end:    {status['end'] or 'it runs'}")
    return lines


def _ranks(run: FollowedRun) -> dict[int, RankObservation]:
    folder = run.attempt / "ranks"
    names = (_LIVE.fullmatch(file.name) for file in folder.glob("rank*.live"))
    ranks = (int(name[1]) for name in names if name)
    found = {rank: read_observation(folder, rank) for rank in ranks}
    return {rank: state for rank, state in sorted(found.items()) if state is not None}


def print_log(run: FollowedRun, *, rank: int | None, follows: bool) -> int:
    """Print a run's output, with `follows` until it ends; return the exit code.

    Args:
        run: the run.
        rank: whose log; None for the job's output of all nodes, or rank 0's.
        follows: True to also print new output.
    """
    run = with_job_id(run)
    if run.job is not None and run.job.engine is not ClusterEngine.SLURM and rank is None:
        if run.job.job_id is None:
            raise _not_running(run, f"its job was {NOT_FOUND}")
        check_client(ENGINES[run.job.engine].CLIENT)
        command = ENGINES[run.job.engine].logs_command(run.job.job_id, run.job.namespace, follows=follows)
        return subprocess.run(command, check=False).returncode
    for chunk in _chunks(run, rank=rank, follows=follows):
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
    if follows and (end := run_status(run)["end"]):
        print(f"zerofit: the run ended: {printable(end)}", file=sys.stderr)
    return 0


def _chunks(run: FollowedRun, *, rank: int | None, follows: bool) -> Iterator[bytes]:
    place, file = 0, None
    asked_at, has_ended = 0.0, False
    while True:
        now = _log_file(run, rank)
        if now != file:
            place, file = 0, now
        before = place
        with contextlib.suppress(OSError), open_regular(file) as log:
            log.seek(place)
            while data := log.read(_BLOCK_BYTES):
                place += len(data)
                yield data
        if place > before:
            pass
        elif has_ended or not follows:
            if place == 0:
                raise _no_log(run, file)
            return
        elif time.monotonic() - asked_at > (_ASK_EVERY_S if run.engine else 0):
            asked_at, has_ended = time.monotonic(), _has_ended(run)
        if follows:
            time.sleep(_POLL_S)


def _log_file(run: FollowedRun, rank: int | None) -> Path:
    if rank is None and run.engine is ClusterEngine.SLURM:
        return run.folder / f"slurm-{run.job and run.job.job_id}.out"
    return run.attempt / "logs" / f"rank{rank or 0}.log"


def _no_log(run: FollowedRun, file: Path | None) -> UserError:
    if run.engine is None and is_over(run):
        return UserError(
            "log-missing",
            "the run has printed nothing",
            found=f"{file}: {'empty' if file and file.exists() else 'no such file'}",
            why=f"it ended: {run_status(run)['end']}",
            fix=f"see its status: zerofit runs status {typed_name(run.folder)}",
        )
    return UserError(
        "log-missing",
        "the run has printed nothing yet",
        found=str(file),
        why=((state := run.scheduler_state()) and f"the job is {state}")
        or "its ranks have printed nothing so far",
        fix=f"wait for it: zerofit runs logs -f {typed_name(run.folder)}",
    )


def is_over(run: FollowedRun) -> bool:
    """Return True if a run has ended, and no scheduler will restart it.

    Raises:
        UserError: its scheduler can't be queried.
    """
    run = with_job_id(run)
    return _is_over(run, run.scheduler_state())


def _is_over(run: FollowedRun, state: str | None) -> bool:
    if run.engine is None:
        if run.record is not None or was_killed(run.folder):
            return True
        alive = [process.lives is not False for process in launchers(run.folder)]
        alive += [is_running(rank.pid) for rank in _ranks(run).values()]
        return not any(alive)
    return state is not None and state.startswith((_FORGOTTEN, *ENGINES[run.engine].OVER))


def _has_ended(run: FollowedRun) -> bool:
    """Return is_over(), and False while the scheduler can't be reached, since it may come back."""
    try:
        return is_over(run)
    except UserError as error:
        if error.rule != "scheduler-unreachable":
            raise
        return False


def cancel(run: FollowedRun) -> str:
    """Cancel a run, and return what was done in a sentence.

    Raises:
        UserError: it is not running.
    """
    if (job := with_job_id(run).job) is not None:
        module = ENGINES[job.engine]
        if job.job_id is None:
            raise _not_running(run, f"its job was {NOT_FOUND}, {job.name}")
        try:
            run_client(module.cancel_command(job.job_id, job.namespace))
        except UserError as error:
            if _is_forgotten(module, error):
                raise _not_running(run, f"{job.engine.value} job {job.job_id} is {_FORGOTTEN}") from None
            raise
        return f"{job.engine.value} job {job.job_id} was told to end"
    if run.record is not None:  # the process that started it may be a notebook, which continues
        raise _not_running(run, "it has ended")
    for process in launchers(run.folder):
        if process.lives:
            os.kill(process.pid, signal.SIGTERM)
            return f"process {process.pid}, which runs it, was told to end"
        if process.lives is None:
            raise _not_running(run, f"process {process.pid} of {process.host} runs it: cancel it there")
    raise _not_running(run, was_killed(run.folder) or "no process on this machine runs it")


def _not_running(run: FollowedRun, why: str) -> UserError:
    return UserError(
        "run-not-running",
        "the run is not running here",
        found=str(run.folder),
        why=why,
        fix=f"see its status: zerofit runs status {typed_name(run.folder)}",
        exit_code=1,
    )
