"""The cache of captures: each with a stamp of all that decides it. No torch in here."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.core.atomic_file import write_whole
from zerofit.core.capture import capture_from_json, capture_to_json
from zerofit.core.errors import UserError
from zerofit.core.secrets import masked
from zerofit.scripts.capture.journal import MOST_READ, is_of_hub, read_entries, read_paths
from zerofit.scripts.capture.restore_files import argument_paths

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from zerofit.core.allocation_log import TraceRequest
    from zerofit.core.capture import Capture
    from zerofit.core.facts import GpuSpec

_ZEROFIT = Path(__file__).parents[2]
_CAPTURING = ("core/capture.py", "scripts/run_target.py", "scripts/capture/**/*.py")
"""The files of zerofit that decide what a capture holds."""
_TRACING = ("core/allocation_log.py", "core/strategy.py", "models/trace/*.py", "scripts/capture/child/*.py")
"""Those that decide what a trace of a captured model holds."""
_VARIABLES = (
    *("DATASETS_", "DS_", "HF_", "PEFT_", "PYTHON", "PYTORCH_", "TOKENIZERS_", "TORCH", "TRANSFORMERS_"),
    "TRL_",
)
"""Prefixes of variables that decide what a script makes, beside those that its own code names."""
_MOST_FILES = 20_000
"""Of a folder named by an argument. ASSUMPTION: to look at more takes longer than it is worth."""
_MOST_CHARACTERS = 200
"""Of what code names. ASSUMPTION: nobody writes a longer path into a script."""
_MOST_CAPTURES = 200
"""Capacity of the folder; the oldest go first. ASSUMPTION: a capture takes up to a MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRun:
    """A script as it is to be run."""

    target: tuple[str, ...]
    """The script or `-m module`, and its arguments."""
    environment: Mapping[str, str]
    """The user's variables."""
    cwd: Path
    gpus: tuple[GpuSpec, ...] = ()
    """Of the node that is planned for, which the script's own code is told of; none: one that stands in."""

    @property
    def gpu_words(self) -> str:
        """The GPUs as a capture says what its script was told: "8 x NVIDIA H100 80GB HBM3"."""
        counts = Counter(gpu.name for gpu in self.gpus)
        return ", ".join(f"{count} x {name}" for name, count in counts.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """The inputs that decide a capture, as they are when it begins."""

    stamps: dict[str, list[object] | None]
    started_ns: int
    """As time.time_ns() has it."""


def load(cache_folder: Path, run: ScriptRun) -> tuple[Capture, str] | None:
    """Return the capture of a run from the cache, and the digest of all that decided it.

    Returns:
        None where there is none, or what decided it has changed.
    """
    try:
        document = json.loads(_file(cache_folder, run).read_text(encoding="utf-8"))
        stamps = document["stamps"]
        if {path: _stamp(Path(path)) for path in stamps} != stamps:
            return None
        if document["environment"] != _environment_stamp(run.environment, stamps):
            return None
        capture = capture_from_json(document["capture"], name="cache")
        return None if capture.told_gpus not in ("", run.gpu_words) else (capture, document["key"])
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return None


def before_run(run: ScriptRun) -> Before:
    """Return the stamp of each file and folder that a run names, and of what its links lead to."""
    script = [] if run.target[0] == "-m" else [run.cwd / run.target[0]]
    arguments = argument_paths(masked(run.target), run.cwd)
    named = {os.path.abspath(path) for path in (*script, *arguments)}
    named |= {os.path.realpath(path) for path in named}
    stamps = {path: _stamp(Path(path)) for path in sorted(named)}
    return Before(stamps=stamps, started_ns=time.time_ns())


def store(
    cache_folder: Path | None, run: ScriptRun, capture: Capture, *, folder: Path, before: Before
) -> str:
    """Keep a capture, and return the digest of all that decided it.

    It is not kept where a file that decided it changed meanwhile, or can't be told apart from another, or
    where it read more files than are noted.
    """
    changed = {entry.path for entry in read_entries(folder)[0]}
    read = {path for path in read_paths(folder) if path not in changed}
    own = {path for path in read - before.stamps.keys() if not is_of_hub(path)}
    is_steady = len(read) <= MOST_READ and all(_changed_ns(path) < before.started_ns for path in own)
    named = _named_in_code(run, (*before.stamps, *read), before.started_ns)
    changed_folders = {str(folder) for path in changed for folder in Path(path).parents}
    read = (read | named) - before.stamps.keys() - changed - changed_folders
    stamps = before.stamps | {path: _stamp(Path(path)) for path in read}
    environment = _environment_stamp(run.environment, stamps)
    key = _digest([_identity(run), environment, stamps, capture.told_gpus])
    if cache_folder is not None and is_steady and None not in stamps.values():
        decided = {"key": key, "stamps": stamps, "environment": environment}
        document = {**decided, "capture": capture_to_json(capture)}
        with contextlib.suppress(OSError):  # a folder that can't be written to keeps none
            write_whole(_file(cache_folder, run), json.dumps(document).encode(), mode=0o600)
            _prune(cache_folder / "captures")
    return key


def trace_file(cache_folder: Path, key: str, request: TraceRequest) -> Path:
    """Return where the trace of a captured model is kept; the capture's key and the request decide it."""
    told = [key, asdict(request), _digest_of_code(_TRACING)]
    return cache_folder / "traces" / f"{_digest(told)}.trace"


def _file(cache_folder: Path, run: ScriptRun) -> Path:
    return cache_folder / "captures" / f"{_digest(_identity(run))}.json"


def _identity(run: ScriptRun) -> list[object]:
    """Return what decides a capture and is known before it."""
    names = (name for folder in sys.path for name in _names_in(folder))
    packages = _digest([name for name in names if name.endswith((".dist-info", ".egg-info"))])
    code = _digest_of_code(_CAPTURING)
    return [run.target, str(run.cwd), sys.executable, sys.version, packages, code]


def _stamp(path: Path) -> list[object] | None:
    """Return what a file or folder is known by: code by its content, data by size and time.

    Returns:
        None where it can't be told apart from another; for a path with links, where it leads.
    """
    try:
        if (real := os.path.realpath(path)) != str(path):
            return ["at", real]
        if path.is_dir():
            return _folder_stamp(path)
        if path.suffix == ".py":
            return ["code", hashlib.sha256(path.read_bytes()).hexdigest()]
        status = path.stat()
        return ["file", status.st_size, status.st_mtime_ns]
    except FileNotFoundError:
        return ["missing"]
    except OSError:
        return None


def _folder_stamp(path: Path) -> list[object] | None:
    found = []
    for here, folders, names in os.walk(path):
        folders.sort()
        links = [name for name in folders if os.path.islink(os.path.join(here, name))]
        for place in (os.path.join(here, name) for name in sorted((*names, *links))):
            status = os.stat(place) if os.path.exists(place) else os.lstat(place)
            leads = os.path.realpath(place) if os.path.islink(place) else ""
            found.append((os.path.relpath(place, path), leads, status.st_size, status.st_mtime_ns))
        if len(found) > _MOST_FILES:
            return None
    return ["folder", _digest(found)]


def _changed_ns(path: str) -> int:
    """Return when a file last changed; 0 for a folder, whose own time changes with what is put back in it."""
    try:
        return 0 if os.path.isdir(path) else os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _named_in_code(run: ScriptRun, code: Iterable[str], started_ns: int) -> set[str]:
    """Return the files and folders that code names in quotes, without what has changed since a time.

    Data that lies in the cache of datasets is not read again, so that nobody sees it opened. Of folders only
    those count that are named from the current one: "/tmp" says nothing of what is read.
    """
    here = os.path.realpath(run.cwd)
    words = {word for word in _quoted(code) if len(word) < _MOST_CHARACTERS}
    words = {word for word in words if not os.path.isabs(word) or not os.path.isdir(word)}
    paths = {os.path.normpath(os.path.join(here, word)) for word in words}
    paths |= {os.path.realpath(path) for path in paths}
    return {
        path
        for path in paths
        if os.path.exists(path) and _changed_ns(path) < started_ns and not Path(here).is_relative_to(path)
    }


def _environment_stamp(environment: Mapping[str, str], code: Iterable[str]) -> str:
    """Return a digest of the variables that decide what a script makes: those of libraries, and those that
    its own code names in quotes."""
    named = _quoted(code)
    return _digest(
        {name: value for name, value in environment.items() if name in named or name.startswith(_VARIABLES)}
    )


def _quoted(paths: Iterable[str]) -> set[str]:
    """Return what stands in quotes in the modules among some files."""
    words: set[str] = set()
    for path in paths:
        if path.endswith(".py"):
            with contextlib.suppress(OSError):
                text = Path(path).read_text(encoding="utf-8", errors="replace")
                words |= set(re.findall(r"""["']([^"'\n\0]+)["']""", text))
    return words


def _digest_of_code(patterns: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for path in (path for pattern in patterns for path in sorted(_ZEROFIT.glob(pattern))):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:40]


def _names_in(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder or "."))
    except OSError:  # sys.path names folders that are not there, and archives
        return []


def _prune(folder: Path) -> None:
    """Remove the oldest captures beyond what the folder may hold."""
    files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in files[_MOST_CAPTURES:]:
        path.unlink(missing_ok=True)
