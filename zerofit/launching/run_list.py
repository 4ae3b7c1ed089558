"""Lists and prunes run folders: their state, their size, and which may be removed."""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import psutil

from zerofit.core.errors import UserError
from zerofit.core.vanishing_files import statuses
from zerofit.launching.clusters.clients import ClusterEngine
from zerofit.launching.clusters.follow import followed_run, is_over
from zerofit.launching.clusters.job import STOP_FILE
from zerofit.launching.diagnose import GOES_ON_AFTER
from zerofit.launching.run_folder import (
    ATTEMPT,
    SUBMITTED_FILE,
    UNREADABLE,
    RunRecord,
    attempts,
    launchers,
    run_record,
    typed_name,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_NAME = re.compile(r"(\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d)-.")
"""Format of run folder names, as in zerofit.launching.run_folder."""
_WRITTEN = (
    "plan.json",
    "accelerate.yaml",
    "ds_config.json",
    "command*.sh",
    "run*.json",
    "checkpoints.jsonl",
    "ranks",
    "logs",
    "job.*",
    "submitted.json",
    "submit.sh",
    "slurm-*.out",
    "launcher*.json",
    STOP_FILE,
)
"""Names that zerofit writes into a run folder; everything else is the user's."""
_QUIET_S = 3600.0
"""A run of another machine without a record, whose files changed this recently, may be running.
ASSUMPTION."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    """A run folder, with its state and size."""

    folder: Path
    started_at: datetime
    """Local time, from the folder's name."""
    num_bytes: int
    """Total size of all files."""
    exit_code: int | None
    """None if the run has left no record."""
    is_unreadable: bool
    """True if its record is damaged."""
    is_running: bool
    """True if it is, or may be, running."""
    is_unknown: bool
    """True if no launcher is recorded, so that it can only be running on another machine."""
    is_only_written: bool
    """True for a job of `zerofit submit --write-only` that has not started."""
    user_files: tuple[str, ...]
    """Files and folders in it that zerofit did not write: checkpoints, results."""

    def as_json(self) -> dict[str, Any]:
        """Return an entry of `zerofit runs list --json`."""
        return {
            "folder": str(self.folder),
            "started_at": self.started_at.astimezone().isoformat(),
            "num_bytes": self.num_bytes,
            "state": self.state,
            "exit_code": None if self.is_running else self.exit_code,
        }

    @property
    def state(self) -> str:
        """The run's state in a word or two."""
        if self.is_running:
            return "unknown" if self.is_unknown else "running"
        if self.is_only_written:
            return "written"
        if self.is_unreadable:
            return "unreadable"
        return "no record" if self.exit_code is None else f"exit {self.exit_code}"


def list_runs(runs: Path) -> tuple[ListedRun, ...]:
    """Return the runs in a directory of run folders, oldest first."""
    if not runs.is_dir():
        return ()
    in_use, silent = _arguments_of_processes(), set[ClusterEngine]()
    folders = (path for path in runs.resolve().iterdir() if path.is_dir() and not path.is_symlink())
    found = []
    for folder in folders:
        try:
            if (started_at := _time_in(folder.name)) is not None:
                found.append(_listed_run(folder, started_at, in_use, silent))
        except FileNotFoundError:
            if folder.exists():  # another `runs prune` may have removed it
                raise
    return tuple(sorted(found, key=lambda run: (run.started_at, run.folder.name)))


def _time_in(name: str) -> datetime | None:
    """Return the time in a run folder's name; None for another folder."""
    match = _NAME.match(name)
    try:
        return None if match is None else datetime.strptime(match[1], "%Y-%m-%d_%H-%M-%S")
    except ValueError:  # digits that are no time
        return None


def _arguments_of_processes() -> tuple[str, ...]:
    return tuple(
        word
        for process in psutil.process_iter(["cmdline"])
        if process.pid != os.getpid()
        for word in process.info["cmdline"] or ()
    )


def _listed_run(
    folder: Path, started_at: datetime, in_use: Sequence[str], silent: set[ClusterEngine]
) -> ListedRun:
    record = run_record(attempts(folder)[-1] / "run.json")  # of the last start
    files = [status for _, status in statuses(folder)]
    newest = max((file.st_mtime for file in files), default=0.0)
    is_used = any(f"{folder}/" in word for word in in_use)
    return ListedRun(
        folder=folder,
        started_at=started_at,
        num_bytes=sum(file.st_size for file in files if stat.S_ISREG(file.st_mode)),
        exit_code=None if record in (None, UNREADABLE) else record.exit_code,
        is_unreadable=record is UNREADABLE,
        is_running=is_used
        or _may_run(folder, record, is_quiet=time.time() - newest >= _QUIET_S, silent=silent),
        is_unknown=not (is_used or (folder / SUBMITTED_FILE).exists() or launchers(folder)),
        is_only_written=_is_only_written(folder),
        user_files=tuple(sorted(_user_files(folder))),
    )


def _is_only_written(folder: Path) -> bool:
    try:
        return followed_run(folder).is_only_written
    except UserError:
        return False


def _may_run(folder: Path, record: RunRecord | None, *, is_quiet: bool, silent: set[ClusterEngine]) -> bool:
    """Return True if a run is running, or if that is unknown.

    Args:
        silent: schedulers that can't be reached, each of which is asked once: a client may take a minute.
    """
    try:
        run = followed_run(folder)
    except UserError:
        return True
    if run.is_only_written:
        return False
    if record not in (None, UNREADABLE) and record.kind not in (GOES_ON_AFTER if run.engine else ()):
        return False
    if run.engine is None:
        lives = [process.lives for process in launchers(run.folder)]
        return True in lives or (not is_quiet and (None in lives or not lives))
    if run.engine in silent:
        return True
    try:
        return not is_over(run)
    except UserError as error:  # unknown
        if error.rule in ("scheduler-unreachable", "client-missing"):
            silent.add(run.engine)
        return True


def _user_files(folder: Path) -> Iterator[str]:
    for entry in folder.iterdir():
        if ATTEMPT.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink():
            yield from (f"{entry.name}/{name}" for name in _user_files(entry))
        elif not any(fnmatch(entry.name, pattern) for pattern in _WRITTEN):
            yield entry.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """The runs to remove, and those old enough that are kept for another reason."""

    removed: tuple[ListedRun, ...]
    spared: tuple[tuple[ListedRun, str], ...]
    """A run, and why it is kept."""


def runs_to_prune(
    found: Sequence[ListedRun],
    *,
    now: datetime,
    older_than_days: float | None,
    keep_last: int | None,
    keep_failed: bool,
) -> Pruning:
    """Choose the runs to remove: those past both limits.

    Args:
        found: all runs, oldest first.
        now: local time.
        older_than_days: only runs that started more than this many days ago; None for any age.
        keep_last: number of newest runs to keep; None for no such limit.
        keep_failed: True to keep runs with another exit code than 0.
    """
    old = found[: len(found) - keep_last] if keep_last else found
    if older_than_days is not None:
        old = [run for run in old if now - run.started_at > timedelta(days=older_than_days)]
    reasons = [(run, _why_kept(run, keep_failed=keep_failed)) for run in old]
    return Pruning(
        removed=tuple(run for run, reason in reasons if reason is None),
        spared=tuple((run, reason) for run, reason in reasons if reason is not None),
    )


def _why_kept(run: ListedRun, *, keep_failed: bool) -> str | None:
    if run.is_running:
        return f"it runs, or may run elsewhere; `zerofit runs cancel {typed_name(run.folder)}` ends it"
    if run.is_only_written:
        return "it was only written, and may still be submitted or wait in a queue"
    if run.is_unreadable:
        return "its run.json can't be read: remove the folder by hand"
    if run.user_files:
        return f"it contains {', '.join(run.user_files)}"
    if keep_failed and run.exit_code != 0:
        return f"it failed ({run.state})"
    return None


def remove_run(run: ListedRun) -> None:
    """Remove a run's folder.

    Raises:
        UserError: it can't be removed.
    """
    while run.folder.exists():
        try:
            shutil.rmtree(run.folder)
        except FileNotFoundError:  # another `runs prune` removes it too
            continue
        except OSError as error:
            raise UserError(
                "run-not-removed",
                "a run's folder can't be removed",
                found=f"{error.strerror}: {error.filename}",
                why="the folder, or one in it, is not writable",
                fix="run this as the owner of the folder",
                exit_code=1,
            ) from None
