"""Runs a script up to where its training would begin, for the verbs that ask for it; says so meanwhile."""

from __future__ import annotations

import click

from zerofit.cli.parameters import Number
from zerofit.core.errors import UserError

DEFAULT_LIMIT_S = 600
"""ASSUMPTION: imports, data and tokenization of most scripts take less; --capture-limit says otherwise."""

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
