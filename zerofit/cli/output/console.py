"""Console: what verbs tell, on stderr; progress only where it is a terminal."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from zerofit.core.observer import Observer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SHOWN = 60
"""Characters of a task's progress that are shown."""


class Console(Observer):
    """Tells everything on stderr."""

    def say(self, sentence: str) -> None:
        """Print a sentence."""
        click.echo(f"zerofit: {sentence}", err=True)

    def show(self, text: str) -> None:
        """Print a text of several lines as it is."""
        click.echo(text, err=True)

    @contextmanager
    def task(self, title: str, *, is_announced: bool = False) -> Iterator[Callable[[str], None]]:
        """Show a spinner with seconds and progress on a terminal."""
        if not sys.stderr.isatty():
            if is_announced:
                self.say(f"{title} ...")
            yield lambda progress: None
            return
        from rich.console import Console as Terminal
        from rich.markup import escape

        started = time.monotonic()
        with Terminal(stderr=True).status(escape(f"{title} ...")) as status:
            yield lambda progress: status.update(
                escape(f"{title} ({time.monotonic() - started:.0f} s): {progress[:_SHOWN]}")
            )
