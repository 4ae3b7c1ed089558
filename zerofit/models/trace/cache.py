"""The cache of traces: one compressed JSON file each, named by a digest of its inputs. Without torch."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import zlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.allocation_log import AllocationLog, Trace
from zerofit.core.atomic_file import write_whole
from zerofit.core.bounded_read import read_bounded
from zerofit.core.cache_folder import cache_folder
from zerofit.core.errors import UserError
from zerofit.core.vanishing_files import remove_oldest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zerofit.core.allocation_log import TraceRequest
    from zerofit.models.source import ModelSource

_PACKAGES = ("torch", "transformers", "accelerate", "peft")
_ZEROFIT = Path(__file__).parents[2]
TRACER_FILES = (
    "core/allocation_log.py",
    "core/freezing.py",
    "core/stage_blocks.py",
    "core/strategy.py",
    "core/upstream/*.py",
    "models/meta_device.py",
    "models/trees.py",
    "models/changes/*.py",
    "models/trace/*.py",
)
"""zerofit's files that affect the content and format of a trace."""
_MOST_BYTES = 256 << 20
"""Maximum size of the folder; the oldest traces are deleted first."""


def default_cache_folder(environment: Mapping[str, str], home: Path) -> Path:
    """Return the folder of cached traces."""
    return cache_folder(environment, home) / "traces"


def key_of(source: ModelSource, request: TraceRequest, *more: str) -> str:
    """Return the name of a trace: a digest of the model, the request, the versions and the tracer itself.

    Args:
        more: words on what else determines the trace.
    """
    inputs = {
        "config": source.config,
        "task": source.task.value,
        "place": source.place if source.trust_remote_code else None,
        "request": dataclasses.asdict(request),
        "versions": {name: _version(name) for name in _PACKAGES},
        "more": more,
    }
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode())
    files = [path for pattern in TRACER_FILES for path in sorted(_ZEROFIT.glob(pattern))]
    for path in files + (_remote_code(source) if source.trust_remote_code else []):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)} ".encode() + content)
    return digest.hexdigest()[:40]


def _remote_code(source: ModelSource) -> list[Path]:
    """Return files that identify a model's custom code.

    For a folder its modules; for a hub repository the file in which the local cache stores the commit of
    `main` (https://huggingface.co/docs/huggingface_hub/guides/manage-cache).
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    found: list[Path] = []
    named = (str(value).split("--")[0] for value in (source.config.get("auto_map") or {}).values() if value)
    for place in sorted({source.place, *named}):
        if Path(place).is_dir():
            found += sorted(Path(place).rglob("*.py"))
        else:
            found.append(Path(HF_HUB_CACHE) / f"models--{place.replace('/', '--')}" / "refs" / "main")
    return [path for path in found if path.is_file()]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


_MOST_UNPACKED = 4 << 30
"""Of a trace; the longest known has 200 MB. ASSUMPTION."""


@cache
def _adapter() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(tuple[tuple[AllocationLog, ...], tuple[str, ...]])


def read_trace(path: Path, request: TraceRequest) -> Trace | None:
    """Return the trace in a file, or None if there is none or it can't be read."""
    try:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(read_bounded(path, most_bytes=_MOST_BYTES), _MOST_UNPACKED)
        if not unpacker.eof:
            return None
        logs, notes = _adapter().validate_json(text)
        return Trace(request=request, logs=logs, notes=notes)
    except (OSError, zlib.error, ValueError):  # includes pydantic's errors
        return None


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace atomically, and delete the oldest ones above the maximum size.

    Nothing is stored if the folder is not writable.
    """
    _write(path, _adapter().dump_json((trace.logs, trace.notes)))


def _write(path: Path, text: bytes) -> None:
    try:
        write_whole(path, zlib.compress(text, 3))
        remove_oldest(path.parent, ".trace", most_bytes=_MOST_BYTES)
    except OSError:
        return


_LASTING = (
    "trace-failed",
    "trace-not-affine",
    "trace-packed-batch",
    "trace-quantized",
    "trace-unknown-inputs",
)
"""Errors that a model and a request lead to each time."""
_PARTS = ("rule", "summary", "found", "why", "fix")
_MOST_SAID = 1 << 16
"""Bytes of an error. ASSUMPTION: it quotes at most some lines of others."""


def kept_trace(path: Path | None, request: TraceRequest, make: Callable[[], Trace]) -> Trace:
    """Return the trace in a file; if there is none, make it and write it there.

    That a model can't be traced is written too: it would take as long to see again. Not so under FSDP2,
    whose process may also have been killed.

    Args:
        path: None to write nothing.

    Raises:
        UserError: the model can't be traced.
    """
    if path is None:
        return make()
    if (trace := read_trace(path, request)) is not None:
        return trace
    if (failure := _read_failure(path)) is not None:
        raise failure
    try:
        trace = make()
    except UserError as error:
        if error.rule in _LASTING and request.sharding is None:
            said = {name: getattr(error, name) for name in _PARTS}
            _write(path, json.dumps({"error": said}).encode())
        raise
    write_trace(path, trace)
    return trace


def _read_failure(path: Path) -> UserError | None:
    """Return the error in the file of a trace that failed; None if there is none."""
    try:
        packed = read_bounded(path, most_bytes=_MOST_BYTES)
        said = json.loads(zlib.decompressobj().decompress(packed, _MOST_SAID))
        parts = {name: str(said["error"][name]) for name in _PARTS}
    except (OSError, zlib.error, ValueError, LookupError, TypeError):
        return None
    rule, summary, found, why, fix = (parts[name] for name in _PARTS)
    return UserError(rule, summary, found=found, why=why, fix=fix)
