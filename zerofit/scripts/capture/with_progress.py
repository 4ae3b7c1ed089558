"""Captures a script for a verb: shows that it runs, and what it left."""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click

from zerofit.scripts.target import script_words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.scripts.capture.capture import CapturedScript


_SHOWN = 60
"""Characters of what the script prints that are shown meanwhile."""


@contextmanager
def captured(target: tuple[str, ...], *, limit_s: float, instead: str) -> Iterator[CapturedScript]:
    """Run a script up to where its training would begin, and hold what it made for as long as the context.

    Args:
        target: the script or `-m module`, and its arguments.
        limit_s: how long it may take.
        instead: which flags of the verb do without, as the end of a sentence.

    Raises:
        UserError: it does not come to a training; the message says what does without.
    """
    from zerofit.core.cache_folder import cache_folder
    from zerofit.machine.library_versions import check_libraries
    from zerofit.scripts.capture.capture import capture_script

    check_libraries()
    with _Progress(script_words(target)) as progress:
        script = capture_script(
            target,
            environment=os.environ,
            cwd=Path.cwd(),
            limit_s=limit_s,
            cache_folder=cache_folder(os.environ, Path.home()),
            on_progress=progress.tell,
            on_start=progress.start,
            instead=instead,
        )
    with script:
        yield script
    for sentence in script.left:
        click.echo(f"zerofit: {sentence}", err=True)


class _Progress:
    """Shows that a script runs, from when it starts: a spinner on a terminal, one line elsewhere.

    Args:
        script: its name.
    """

    def __init__(self, script: str) -> None:
        self._script = script
        self._title = f"looking at what {script} trains, up to its first step"
        self._status: Any = None
        self._started = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def start(self, is_again: bool) -> None:
        """Say that the script runs, or that it does again for a model that the cache does not hold."""
        if is_again:
            why = "what it trains is known from before, and its model is needed once more"
            click.echo(f"zerofit: {self._script} runs again up to its first step: {why} ...", err=True)
        elif not sys.stderr.isatty():
            click.echo(f"zerofit: {self._title} ...", err=True)
        else:
            from rich.console import Console

            self._started = time.monotonic()
            self._status = Console(stderr=True).status(f"{self._title} ...")
            self._status.start()

    def tell(self, what: str) -> None:
        """Show what the script last printed."""
        if self._status is not None:
            from rich.markup import escape

            seconds = time.monotonic() - self._started
            self._status.update(f"{self._title} ({seconds:.0f} s): {escape(what[:_SHOWN])}")
