"""The installed packages to Versions, from their metadata alone: nothing is imported."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import Distribution
from typing import TYPE_CHECKING

import zerofit
from zerofit.facts import Versions

if TYPE_CHECKING:
    from collections.abc import Sequence


def probe_versions(*, search_path: Sequence[str] | None = None) -> Versions:
    """Return the version of each package that a run is made of.

    Args:
        search_path: folders to look for packages in; None stands for sys.path.
    """
    folders = list(sys.path if search_path is None else search_path)
    return Versions(
        python=platform.python_version(),
        zerofit=zerofit.__version__,
        torch=_version("torch", folders),
        accelerate=_version("accelerate", folders),
        deepspeed=_version("deepspeed", folders),
        transformers=_version("transformers", folders),
        peft=_version("peft", folders),
        bitsandbytes=_version("bitsandbytes", folders),
    )


def _version(package: str, folders: list[str]) -> str | None:
    for distribution in Distribution.discover(name=package, path=folders):
        return distribution.version
    return None
