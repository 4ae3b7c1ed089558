"""Runs a script up to where its training would begin, for the verbs that ask for it; says so meanwhile."""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zerofit.cli.parameters import Number
from zerofit.errors import UserError
from zerofit.render.capture_words import script_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerofit.probe.script import CapturedScript

DEFAULT_LIMIT_S = 600
"""ASSUMPTION: imports, data and tokenization of most scripts take less; --capture-limit says otherwise."""
_SHOWN = 60
"""Characters of what the script prints that are shown meanwhile."""

capture_limit_option = click.option(
    "--capture-limit",
    "capture_limit_s",
    metavar="SECONDS",
    type=Number(float, least=1),
    default=DEFAULT_LIMIT_S,
    show_default=True,
    help="How long SCRIPT may take to come to its training.",
)


def check_limit(limit_s: float, *, because: str) -> None:
    """Return where --capture-limit is left out; for a verb that captures nothing.

    Args:
        limit_s: what was said.
        because: why nothing is captured: the flag that says so.

    Raises:
        UserError: it was given.
    """
    if limit_s != DEFAULT_LIMIT_S:
        raise UserError(
            "capture-limit-without-capture",
            "a limit for a capture, and nothing is captured",
            found=f"--capture-limit {limit_s:g} with {because}",
            why="it is how long the script may take to come to its training, when it is run to look at it",
            fix="leave out --capture-limit",
        )


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
    from zerofit.probe.cache_folder import cache_folder
    from zerofit.probe.script import capture_script

    with _progress(f"looking at what {script_of(target)} trains, up to its first step") as tell:
        script = capture_script(
            target,
            environment=os.environ,
            cwd=Path.cwd(),
            limit_s=limit_s,
            cache_folder=cache_folder(os.environ, Path.home()),
            on_progress=tell,
            instead=instead,
        )
    with script:
        yield script
    for sentence in script.left:
        click.echo(f"zerofit: {sentence}", err=True)


@contextmanager
def _progress(title: str) -> Iterator[Callable[[str], None]]:
    """Show that something runs: a spinner on a terminal, one line elsewhere."""
    if not sys.stderr.isatty():
        click.echo(f"zerofit: {title} ...", err=True)
        yield lambda _: None
        return
    from rich.console import Console
    from rich.markup import escape

    started = time.monotonic()
    with Console(stderr=True).status(f"{title} ...") as status:
        yield lambda what: status.update(
            f"{title} ({time.monotonic() - started:.0f} s): {escape(what[:_SHOWN])}"
        )
