"""The cache of captures, each with a fingerprint of its inputs. Without torch."""

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
from typing import TYPE_CHECKING, Any

from zerofit.core.atomic_file import write_whole
from zerofit.core.bounded_read import read_bounded_text
from zerofit.core.capture import capture_from_json, capture_to_json
from zerofit.core.errors import UserError
from zerofit.core.facts import GpuSpec
from zerofit.core.secrets import masked
from zerofit.core.validation import parse_known
from zerofit.core.vanishing_files import remove_oldest
from zerofit.models.trace.cache import TRACER_FILES
from zerofit.scripts.capture.journal import MAX_FILES_READ, is_of_hub, read_entries, read_paths
from zerofit.scripts.capture.restore_files import argument_paths
from zerofit.scripts.target import script_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from zerofit.core.allocation_log import TraceRequest
    from zerofit.core.capture import Capture

_ZEROFIT = Path(__file__).parents[2]
_CAPTURING = ("core/capture.py", "scripts/run_target.py", "scripts/capture/**/*.py")
"""zerofit's files that affect the content of a capture."""
_TRACING = (*TRACER_FILES, "scripts/capture/child/*.py")
"""zerofit's files that affect the trace of a captured model."""
_PREFIXES = (
    "DATASETS_",
    "DS_",
    "HF_",
    "PEFT_",
    "PYTHON",
    "PYTORCH_",
    "TOKENIZERS_",
    "TORCH",
    "TRANSFORMERS_",
    "TRL_",
)
"""Prefixes of environment variables that affect scripts, beside those named in the script's own code."""
_MAX_FILES = 20_000
"""Maximum files considered in a folder named by an argument. ASSUMPTION: more would take too long."""
_MAX_CHARACTERS = 200
"""Maximum length of a path in code. ASSUMPTION: no script contains a longer one."""
_MAX_CAPTURES = 200
"""Maximum number of captures; the oldest are deleted first. ASSUMPTION: a capture takes up to a MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRun:
    """A script to run."""

    target: tuple[str, ...]
    """The script or `-m module`, and its arguments."""
    environment: Mapping[str, str]
    """The user's environment variables."""
    cwd: Path
    gpus: tuple[GpuSpec, ...] = ()
    """GPUs of the planned node, which the script's own code sees; empty: STAND_IN_GPU."""


STAND_IN_GPU = GpuSpec(
    name="a GPU that stands in for yours", memory_bytes=80 * 2**30, compute_capability=(8, 0)
)
"""The GPU that a script sees if no node is planned: like an A100 with 80 GB."""


def gpu_words(gpus: tuple[GpuSpec, ...]) -> str:
    """Return GPUs as recorded in the capture: "8 x NVIDIA H100 80GB HBM3"."""
    counts = Counter(gpu.name for gpu in gpus)
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class InputStamps:
    """The inputs of a capture, recorded at its start."""

    stamps: dict[str, list[object] | None]
    started_ns: int
    """Start time, as time.time_ns()."""


_MOST_BYTES = 256 * 1024 * 1024
"""Of a file of the cache; a long capture has some MB. ASSUMPTION."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A file of the cache."""

    stamps: dict[str, Any]
    """Of each input, by path."""
    environment: Any
    capture: str
    """As JSON."""
    key: str


def load(
    cache_folder: Path, run: ScriptRun, own_folders: tuple[Path, ...] = ()
) -> tuple[Capture, str] | None:
    """Return the cached capture of a run, and the digest of its inputs.

    Args:
        own_folders: outputs of the run itself; changes in them don't invalidate the capture.

    Returns:
        None if there is none, or an input has changed.
    """
    try:
        kept = parse_known(_Kept, read_bounded_text(_file(cache_folder, run), most_bytes=_MOST_BYTES))
        stamps = kept.stamps
        for path, stamp in stamps.items():
            is_made = any(Path(path).is_relative_to(folder) for folder in own_folders)
            if not is_made and _stamp(Path(path)) != stamp:
                return None
        if kept.environment != _environment_stamp(run.environment, stamps):
            return None
        capture = capture_from_json(kept.capture, name="cache")
        shown = gpu_words(run.gpus or (STAND_IN_GPU,))
        return None if capture.told_gpus not in ("", shown) else (capture, kept.key)
    except (OSError, ValueError, TypeError, UserError):
        return None


def stamp_inputs(run: ScriptRun) -> InputStamps:
    """Return the stamp of each file and folder that a run's arguments name, and of link targets."""
    paths = argument_paths(masked(run.target), run.cwd)
    if (script := script_path(run.target)) is not None:
        paths.append(run.cwd / script)
    named = {os.path.abspath(path) for path in paths}
    named |= {os.path.realpath(path) for path in named}
    stamps = {path: _stamp(Path(path)) for path in sorted(named)}
    return InputStamps(stamps=stamps, started_ns=time.time_ns())


def store(
    cache_folder: Path | None, run: ScriptRun, capture: Capture, *, folder: Path, before: InputStamps
) -> str:
    """Store a capture, and return the digest of its inputs.

    It is not stored if an input file changed meanwhile, or can't be identified, or if it read more files than
    are recorded.
    """
    changed = {entry.path for entry in read_entries(folder)[0]}
    read = {path for path in read_paths(folder) if path not in changed}
    own = {path for path in read - before.stamps.keys() if not is_of_hub(path)}
    is_steady = len(read) <= MAX_FILES_READ and all(_changed_ns(path) < before.started_ns for path in own)
    named = _named_in_code(run, (*before.stamps, *read), before.started_ns)
    changed_folders = {str(folder) for path in changed for folder in Path(path).parents}
    read = (read | named) - before.stamps.keys() - changed - changed_folders
    stamps = before.stamps | {path: _stamp(Path(path)) for path in read}
    environment = _environment_stamp(run.environment, stamps)
    key = _digest([_identity(run), environment, stamps, capture.told_gpus])
    if cache_folder is not None and is_steady and None not in stamps.values():
        decided = {"key": key, "stamps": stamps, "environment": environment}
        document = {**decided, "capture": capture_to_json(capture)}
        with contextlib.suppress(OSError):  # nothing is stored if the folder is not writable
            write_whole(_file(cache_folder, run), json.dumps(document).encode(), mode=0o600)
            remove_oldest(cache_folder / "captures", ".json", most_files=_MAX_CAPTURES)
    return key


def trace_file(cache_folder: Path, key: str, request: TraceRequest) -> Path:
    """Return the file for the trace of a captured model, named by the capture's key and the request."""
    parts = [key, asdict(request), _digest_of_code(_TRACING)]
    return cache_folder / "traces" / f"{_digest(parts)}.trace"


def _file(cache_folder: Path, run: ScriptRun) -> Path:
    return cache_folder / "captures" / f"{_digest(_identity(run))}.json"


def _identity(run: ScriptRun) -> list[object]:
    """Return the inputs of a capture that are known before it runs."""
    names = (name for folder in sys.path for name in _names_in(folder))
    packages = _digest([name for name in names if name.endswith((".dist-info", ".egg-info"))])
    code = _digest_of_code(_CAPTURING)
    return [run.target, str(run.cwd), sys.executable, sys.version, packages, code]


def _stamp(path: Path) -> list[object] | None:
    """Return a stamp of a file or folder: content for code, size and time for data.

    Returns:
        None if it can't be identified; for a path with links, the target's stamp.
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
        if len(found) > _MAX_FILES:
            return None
    return ["folder", _digest(found)]


def _changed_ns(path: str) -> int:
    """Return when a file last changed; 0 for a folder, whose time changes when its content is restored."""
    try:
        return 0 if os.path.isdir(path) else os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _named_in_code(run: ScriptRun, code: Iterable[str], started_ns: int) -> set[str]:
    """Return the files and folders named in string literals of code, except those changed since a time.

    This covers data that is already in the cache of datasets, and therefore not opened. Folders only count if
    named relative to the current one: "/tmp" says nothing about the files read.
    """
    here = os.path.realpath(run.cwd)
    words = {word for word in _quoted(code) if len(word) < _MAX_CHARACTERS}
    words = {word for word in words if not os.path.isabs(word) or not os.path.isdir(word)}
    paths = {os.path.normpath(os.path.join(here, word)) for word in words}
    paths |= {os.path.realpath(path) for path in paths}
    return {
        path
        for path in paths
        if os.path.exists(path) and _changed_ns(path) < started_ns and not Path(here).is_relative_to(path)
    }


def _environment_stamp(environment: Mapping[str, str], code: Iterable[str]) -> str:
    """Return a digest of the environment variables that affect a script.

    These are the libraries' variables, and those that the script's own code names in string literals.
    """
    named = _quoted(code)
    return _digest(
        {name: value for name, value in environment.items() if name in named or name.startswith(_PREFIXES)}
    )


def _quoted(paths: Iterable[str]) -> set[str]:
    """Return the string literals in the modules among some files."""
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
    except OSError:  # sys.path contains missing folders and archives
        return []
