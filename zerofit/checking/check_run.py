"""The rules before anything is written or started: errors stop, warnings are said once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from zerofit.checking.engine import Verdict, sort_findings
from zerofit.checking.engine import check as check_rules
from zerofit.checking.inputs.capture import with_capture
from zerofit.checking.inputs.situations import situations
from zerofit.checking.rule import Severity
from zerofit.checking.rules import ALL_RULES

if TYPE_CHECKING:
    from zerofit.checking.targets import Targets

from typing import TYPE_CHECKING

from zerofit.checking.engine import check

if TYPE_CHECKING:
    from zerofit.checking.situation import Situation

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


def verdict_of(targets: Targets) -> Verdict:
    """Return what all rules say of all situations that the targets make, each thing once."""
    made = situations(targets)
    if targets.capture is not None:
        made = tuple(with_capture(situation, targets.capture) for situation in made)
    verdicts = [check_rules(situation, rules=ALL_RULES) for situation in made]
    return Verdict(
        findings=sort_findings(finding for verdict in verdicts for finding in verdict.findings),
        # Of a file that can't be read everything is unknown, and not worth a line.
        unknown=()
        if targets.files and all(file.broken for file in targets.files)
        else tuple(dict.fromkeys(unknown for verdict in verdicts for unknown in verdict.unknown)),
    )
