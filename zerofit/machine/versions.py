"""The installed packages to Versions, from the names of their metadata folders: nothing is imported.

importlib.metadata says the same, and takes as long to import and to parse as all of `zerofit --help` takes.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from typing import TYPE_CHECKING

from zerofit.core.facts import Versions
from zerofit.core.supported import SUPPORTED
from zerofit.core.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

_METADATA = re.compile(r"(?P<name>[A-Za-z0-9._]+)-(?P<version>[^-]+)(-py[\d.]+)?\.(dist|egg)-info")
"""https://packaging.python.org/en/latest/specifications/recording-installed-packages/#the-dist-info-directory"""


def probe_versions(*, search_path: Sequence[str] | None = None) -> Versions:
    """Return the version of each package that a run is made of.

    Args:
        search_path: folders to look for packages in; None stands for sys.path.
    """
    installed: dict[str, str] = {}
    for folder in sys.path if search_path is None else search_path:
        for name in _names_in(folder or "."):
            found = _METADATA.fullmatch(name)
            if found and found["name"].lower() in SUPPORTED:
                installed.setdefault(found["name"].lower(), found["version"])
    return Versions(python=platform.python_version(), zerofit=VERSION, **installed)


def _names_in(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:  # sys.path names folders that are not there, and archives
        return []
