"""The flag of every verb that runs a script up to where its training would begin."""

from __future__ import annotations

import click

from zerofit.cli.parameters import Number
from zerofit.planning.inputs import CAPTURE_LIMIT_S

capture_limit_option = click.option(
    "--capture-limit",
    "capture_limit_s",
    metavar="SECONDS",
    type=Number(float, least=1),
    default=CAPTURE_LIMIT_S,
    show_default=True,
    help="How long SCRIPT may take to come to its training.",
)
