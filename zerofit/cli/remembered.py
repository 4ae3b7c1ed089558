"""Searches that were made before, on disk: the same question is answered at once."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.planning.solve import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

_PACKAGE = Path(__file__).parents[1]
_DECIDING = ("estimate", "planning", "probe/trace", "compat", "catalog", ".")
"""Folders of zerofit whose files decide an answer."""


def remembered(told: str, find_out: Callable[[], Outcome]) -> Outcome:
    """Return what find_out returns, or what it did when it was last told the same.

    Args:
        told: all that the answer depends on, beside zerofit's own files.
        find_out: the search.
    """
    from pydantic import TypeAdapter, ValidationError

    adapter = TypeAdapter(Outcome)
    path = _folder() / f"{_key(told)}.json"
    try:
        return adapter.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        outcome = find_out()
    _write(path, adapter.dump_json(outcome))
    return outcome


def _folder() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(caches) if caches.startswith("/") else Path.home() / ".cache") / "zerofit" / "plans"


def _key(told: str) -> str:
    digest = hashlib.sha256(told.encode())
    for folder in _DECIDING:
        for entry in sorted(os.scandir(_PACKAGE / folder), key=lambda entry: entry.name):
            if entry.is_file():
                status = entry.stat()
                digest.update(f"{entry.name} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()[:40]


def _write(path: Path, content: bytes) -> None:
    """Write the file whole or not at all; a folder that can't be written to keeps none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content)
        os.replace(file.name, path)
    except OSError:
        return
