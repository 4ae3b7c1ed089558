"""Installed libraries before a verb imports them: unsupported versions are refused, untested ones said."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.core.supported import ALWAYS_USED, USED_BY_TRACES, packages_of, unsupported, untested
from zerofit.machine.versions import probe_versions

if TYPE_CHECKING:
    from zerofit.core.observer import Observer
    from zerofit.core.strategy import Strategy


_said: set[str] = set()


def check_libraries(observer: Observer) -> None:
    """Check that every run's libraries are there in supported versions, and say once which are untested.

    Args:
        observer: is told which ones zerofit was never tested with.

    Raises:
        UserError: some are missing, or of another version.
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
    """Check that those of the libraries that trace a model which are installed are supported.

    Raises:
        UserError: some are of another version.
    """
    versions = probe_versions()
    error = unsupported(versions, (name for name in USED_BY_TRACES if getattr(versions, name) is not None))
    if error is not None:
        raise error


def check_libraries_of(strategy: Strategy) -> None:
    """Check the same of the libraries that a strategy needs beside those of every run.

    Raises:
        UserError: some are missing, or of another version.
    """
    error = unsupported(probe_versions(), packages_of(strategy))
    if error is not None:
        raise error
