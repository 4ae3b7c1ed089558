"""The folder of each run: plan, configurations, command, logs, records."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from zerofit.core.atomic_file import write_whole
from zerofit.core.bounded_read import read_bounded_text
from zerofit.core.checkpoints import inspect_checkpoint, noted_checkpoints
from zerofit.core.errors import UserError
from zerofit.core.json_text import parse_json
from zerofit.core.processes import has_ended
from zerofit.core.run_name import RUNS_NAME, run_name
from zerofit.core.validation import parse_known

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerofit.core.checkpoints import SavedCheckpoint

RUNS = Path(RUNS_NAME)
"""Default folder of all run folders."""
SUBMITTED_FILE = "submitted.json"
"""The job of a run that was submitted."""
TUNE_PREFIX, LADDER_PREFIX = "tune-", "ladder-"
TRIALS_PREFIXES = (TUNE_PREFIX, LADDER_PREFIX)
"""Prefixes of folders of trials, which are beside run folders."""

ATTEMPT = re.compile(r"(requeue|recovery)-[0-9]{1,6}")
"""Names of the folders of later starts, inside a run's own."""
_MOST_BYTES = 256 * 1024 * 1024
"""Of a file in a run folder; a plan with a long capture has some MB. ASSUMPTION."""
_LARGEST_PID = 2**22
"""Of Linux (proc(5), pid_max)."""
_SAME_START_S = 2.0
"""A process's start time is the boot time, which NTP shifts, plus ticks since then. ASSUMPTION."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """The paths of a run's files."""

    path: Path
    node: int = 0
    """The node whose record is there; several nodes may share the folder."""

    @property
    def plan(self) -> Path:
        """The plan file, which every rank reads."""
        return self.path / "plan.json"

    @property
    def deepspeed(self) -> Path:
        """The DeepSpeed JSON; absent with the native engine."""
        return self.path / "ds_config.json"

    @property
    def accelerate(self) -> Path:
        """The accelerate YAML."""
        return self.path / "accelerate.yaml"

    @property
    def command(self) -> Path:
        """The command as a shell script; run again, it writes into this same folder."""
        return self.path / f"command{self._of_node}.sh"

    @property
    def ranks(self) -> Path:
        """One record per rank."""
        return self.path / "ranks"

    @property
    def run(self) -> Path:
        """How the run ended."""
        return self.path / f"run{self._of_node}.json"

    @property
    def launcher(self) -> Path:
        """The process that runs it."""
        return self.path / f"launcher{self._of_node}.json"

    @property
    def _of_node(self) -> str:
        return f"-node{self.node}" if self.node else ""


def run_folder(runs: Path, *, target: str, at: datetime, attempt: int = 1) -> RunFolder:
    """Return the folder of a run, named after the time and the script or module; nothing is written."""
    name = run_name(target, at)
    return RunFolder(path=runs.resolve() / (name if attempt == 1 else f"{name}-{attempt}"))


def new_run_folder(runs: Path, *, target: str, at: datetime) -> RunFolder:
    """Create the folder of a run, private to its owner; a number is appended if the name is taken."""
    attempt, is_first = 1, not os.path.exists(runs)
    while True:
        folder = run_folder(runs, target=target, at=at, attempt=attempt)
        try:
            folder.path.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            if not runs.is_dir():
                raise _not_writable(f"{runs} is not a folder") from None
            attempt += 1
        except OSError as error:
            raise _not_writable(f"{error.strerror}: {error.filename}") from None
        else:
            if is_first:  # so that git ignores runs; an existing folder is not changed
                write_file(runs / ".gitignore", "*\n")
            return folder


def check_run_dir(runs: Path) -> None:
    """Check early that the folder of all runs can be written, or made.

    Raises:
        UserError: it can't.
    """
    nearest = next(parent for parent in (runs, *runs.parents) if parent.exists())
    if not nearest.is_dir():
        raise _not_writable(f"{nearest} is not a folder")
    if not os.access(nearest, os.W_OK):
        raise _not_writable(f"no permission to write to {nearest}")


def make_folder(path: Path) -> None:
    """Create a folder, private to its owner, if it does not exist."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _not_writable(f"{error.strerror}: {error.filename}") from None


def fill_run_folder(folder: RunFolder, files: Mapping[Path, str]) -> None:
    """Write the files of a run before its start."""
    for path, text in files.items():
        write_file(path, text, executable=path == folder.command)


def write_file(path: Path, text: str, *, executable: bool = False) -> None:
    """Write a run folder's file atomically, private to its owner: arguments may contain tokens."""
    try:
        write_whole(path, text, mode=0o700 if executable else 0o600)
    except OSError as error:
        raise _not_writable(f"{error.strerror}: {path}") from None


def attempts(folder: Path) -> tuple[Path, ...]:
    """Return the folders of a run's starts in order: its own, then one for each requeue or recovery."""
    later = (path for path in folder.iterdir() if ATTEMPT.fullmatch(path.name) and path.is_dir())
    return (folder, *sorted(later, key=lambda path: int(path.name.rpartition("-")[2])))


def document_in(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a run folder; empty if there is none."""
    try:
        found = parse_json(read_bounded_text(path, most_bytes=_MOST_BYTES))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """How a run ended, as run.json has it beside much that is for people."""

    exit_code: int
    started_at: str | None = None
    """ISO 8601."""
    ended_at: str | None = None
    """ISO 8601."""
    cause: str | None = None
    """Why it failed, in a sentence; None on success."""
    kind: str | None = None
    """Of zerofit.launching.diagnose.EndKind."""
    rank: int | None = None
    """The rank that the cause is about."""

    def __post_init__(self) -> None:
        """Check the times.

        Raises:
            ValueError: one is none.
        """
        for moment in (self.started_at, self.ended_at):
            if moment is not None:
                datetime.fromisoformat(moment)


UNREADABLE = RunRecord(exit_code=-1, cause="its run.json can't be read", kind="unreadable")
"""Stands for a record that is damaged."""


def run_record(path: Path) -> RunRecord | None:
    """Return the record in a run.json: UNREADABLE if it is damaged, None if there is none."""
    try:
        return parse_known(RunRecord, read_bounded_text(path, most_bytes=_MOST_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return UNREADABLE


def newest_checkpoint(*folders: Path) -> SavedCheckpoint | None:
    """Return the newest complete checkpoint recorded by a run's starts, the last start first."""
    noted = (path for folder in folders for path in noted_checkpoints(folder) if path.is_dir())
    return next((checkpoint for path in noted if (checkpoint := inspect_checkpoint(path)).is_complete), None)


def note_launcher(folder: RunFolder) -> None:
    """Record that this process runs a run."""
    process = psutil.Process()
    document = {
        "host": os.uname().nodename,
        "pid": process.pid,
        "started_at": process.create_time(),  # of the process, which may be a notebook's
        "noted_at": time.time(),
    }
    write_file(folder.launcher, json.dumps(document, indent=2) + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launcher:
    """A launcher.json."""

    host: str
    pid: int
    started_at: float
    noted_at: float | None = None

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: one is out of range.
        """
        if not 0 < self.pid <= _LARGEST_PID:
            raise ValueError(f"pid: {self.pid} is none")
        for moment in (self.started_at, self.noted_at):
            if moment is not None and iso_time(moment) is None:
                raise ValueError(f"{moment} is no time")


def _launcher_in(file: Path) -> _Launcher | None:
    """Return the launcher in a file; None if there is none, or it is damaged."""
    try:
        return parse_known(_Launcher, read_bounded_text(file, most_bytes=_MOST_BYTES))
    except (OSError, ValueError):
        return None


def iso_time(seconds: float) -> str | None:
    """Return a time since 1970 as ISO 8601 in UTC; None if it is out of range."""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return None


def noted_at(folder: Path) -> str | None:
    """Return when a run's launcher on node 0 was recorded, as ISO 8601; None if it was not."""
    found = _launcher_in(folder / "launcher.json")
    return None if found is None or found.noted_at is None else iso_time(found.noted_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherProcess:
    """The process that runs, or ran, a run on one node."""

    host: str
    pid: int
    lives: bool | None
    """None for a process of another machine."""


def typed_name(folder: Path) -> str:
    """Return a run folder as one types it for `zerofit runs`: by name in the default place, else by path."""
    is_there = Path(RUNS, folder.name).absolute() == folder.absolute()
    return shlex.quote(folder.name if is_there else str(folder))


def launchers(folder: Path) -> tuple[LauncherProcess, ...]:
    """Return the launchers recorded in a run folder, node 0's first."""
    found = []
    for file in sorted(folder.glob("launcher*.json")):
        if (noted := _launcher_in(file)) is not None:
            lives = _lives(noted.pid, noted.started_at) if noted.host == os.uname().nodename else None
            found.append(LauncherProcess(host=noted.host, pid=noted.pid, lives=lives))
    return tuple(found)


def _lives(pid: int, started_at: float) -> bool:
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - started_at) < _SAME_START_S and not has_ended(process)
    except psutil.NoSuchProcess:
        return False


def was_killed(folder: Path) -> str | None:
    """Return a sentence if all launchers of a run on this machine are gone; None if one may be alive."""
    found = launchers(folder)
    if not found or any(process.lives is not False for process in found):
        return None
    return f"zerofit itself, process {found[0].pid}, ended without a record: it was killed"


def _not_writable(found: str) -> UserError:
    return UserError(
        "run-folder-not-writable",
        "the run's folder is not writable",
        found=found,
        why="each run writes its plan, configurations, logs and records into its own folder",
        fix="name a writable folder: --run-dir DIR",
    )
