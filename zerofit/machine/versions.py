"""Versions of the installed packages, from the names of their metadata folders: nothing is imported.

importlib.metadata gives the same, but takes as long to import and parse as all of `zerofit --help`.
Verbs refuse unsupported versions and report untested ones before they import the packages.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from typing import TYPE_CHECKING

from zerofit.core.facts import Versions
from zerofit.core.supported import ALWAYS_USED, SUPPORTED, USED_BY_TRACES, packages_of, unsupported, untested
from zerofit.core.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerofit.core.observer import Observer
    from zerofit.core.strategy import Strategy


_METADATA = re.compile(r"(?P<name>[A-Za-z0-9._]+)-(?P<version>[^-]+)(-py[\d.]+)?\.(dist|egg)-info")
"""https://packaging.python.org/en/latest/specifications/recording-installed-packages/#the-dist-info-directory"""


def probe_versions(*, search_path: Sequence[str] | None = None) -> Versions:
    """Return the version of each package that a run uses.

    Args:
        search_path: folders with packages; None means sys.path.
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
    except OSError:  # sys.path contains missing folders and archives
        return []


_said: set[str] = set()


def check_libraries(observer: Observer) -> None:
    """Check that every run's libraries are installed in supported versions; report untested ones once.

    Args:
        observer: receives the report.

    Raises:
        UserError: some are missing, or unsupported.
    """
    versions = probe_versions()
    error = unsupported(versions, ALWAYS_USED)
    if error is not None:
        raise error
    for sentence in untested(versions):
        if sentence not in _said:
            _said.add(sentence)
            observer.say(sentence)


def check_libraries_of_traces() -> None:
    """Check that the installed libraries among those used for tracing are supported.

    Raises:
        UserError: some are unsupported.
    """
    versions = probe_versions()
    error = unsupported(versions, (name for name in USED_BY_TRACES if getattr(versions, name) is not None))
    if error is not None:
        raise error


def check_libraries_of(strategy: Strategy) -> None:
    """Check the libraries that a strategy needs in addition to those of every run.

    Raises:
        UserError: some are missing, or unsupported.
    """
    error = unsupported(probe_versions(), packages_of(strategy))
    if error is not None:
        raise error
