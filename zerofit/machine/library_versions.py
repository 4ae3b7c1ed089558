"""Installed libraries before a verb imports them: unsupported versions are refused, untested ones said."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import click

from zerofit.core.supported import ALWAYS_USED, USED_BY_TRACES, packages_of, unsupported, untested
from zerofit.machine.versions import probe_versions

if TYPE_CHECKING:
    from zerofit.core.strategy import Strategy


@cache
def check_libraries() -> None:
    """Check that every run's libraries are there in supported versions, and say once which are untested.

    Raises:
        UserError: some are missing, or of another version.
    """
    versions = probe_versions()
    error = unsupported(versions, ALWAYS_USED)
    if error is not None:
        raise error
    for sentence in untested(versions):
        click.echo(f"zerofit: {sentence}", err=True)


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
