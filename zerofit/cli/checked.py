"""The rules before anything is written or started: errors stop, warnings are said once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from zerofit.compat import ALL_RULES
from zerofit.compat.engine import check
from zerofit.compat.rule import Severity

if TYPE_CHECKING:
    from zerofit.compat.situation import Situation

no_check_option = click.option(
    "--no-check", is_flag=True, help="Go on where the rules of `zerofit check` say that it can't work."
)


def stop_at_errors(situation: Situation, *, no_check: bool) -> None:
    """Print what the rules warn of, and end the command where they say that it can't work.

    Args:
        situation: what will run.
        no_check: whether to print errors as well, and go on.

    Raises:
        ExceptionGroup: of one UserError for each finding that is an error.
    """
    verdict = check(situation, rules=ALL_RULES)
    errors, warnings = verdict.of(Severity.ERROR), verdict.of(Severity.WARNING)
    for finding in warnings + (errors if no_check else ()):
        click.echo(finding.as_text(), err=True)
    if errors and not no_check:
        raise ExceptionGroup("combinations that do not work", [finding.as_error() for finding in errors])
