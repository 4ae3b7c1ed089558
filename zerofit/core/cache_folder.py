"""The folder that zerofit keeps measurements and traces in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def cache_folder(environment: Mapping[str, str], home: Path) -> Path:
    """Return the folder zerofit under XDG_CACHE_HOME, or under ~/.cache.

    A relative XDG_CACHE_HOME counts as none. Source: https://specifications.freedesktop.org/basedir/latest/

    Args:
        environment: the process's variables.
        home: the user's folder.
    """
    caches = environment.get("XDG_CACHE_HOME", "")
    return (Path(caches) if os.path.isabs(caches) else home / ".cache") / "zerofit"
