"""Options that several verbs share, apart from those of a strategy: their import takes no time."""

from __future__ import annotations

from pathlib import Path

import click

from zerofit.cli.parameters import number_option
from zerofit.scripts.capture.limit import CAPTURE_LIMIT_S

capture_limit_option = number_option(
    "--capture-limit",
    "capture_limit_s",
    metavar="SECONDS",
    kind=float,
    default=CAPTURE_LIMIT_S,
    help="How long SCRIPT may take to reach its training.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
wide_option = click.option("--wide", is_flag=True, help="Tables with all columns, wider than the terminal.")
run_dir_option = click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    default=Path("zerofit-runs"),
    show_default=True,
    help="Folder that contains the run folders.",
)
