"""The folder for zerofit's cached measurements and traces."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def cache_folder(environment: Mapping[str, str], home: Path) -> Path:
    """Return zerofit's cache folder: $XDG_CACHE_HOME/zerofit, or ~/.cache/zerofit.

    A relative XDG_CACHE_HOME is ignored. Source: https://specifications.freedesktop.org/basedir/latest/

    Args:
        environment: the process's variables.
        home: the user's home folder.
    """
    caches = environment.get("XDG_CACHE_HOME", "")
    return (Path(caches) if os.path.isabs(caches) else home / ".cache") / "zerofit"
