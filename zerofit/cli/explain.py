"""zerofit explain: why a run failed, from its folder or its logs, whoever started it."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from zerofit.cli.completion import complete_file
from zerofit.cli.output.console import echo, for_terminal
from zerofit.cli.output.explanation import explanation_json, explanation_text
from zerofit.core.errors import UserError
from zerofit.launching.explain import explain_bytes, explain_logs, logs_in
from zerofit.launching.explain_run import RunExplanation, explain_run, is_run_folder


@click.command()
@click.argument("path", metavar="RUN|LOG|DIR|-", shell_complete=complete_file)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of lines.")
def explain(path: str, *, as_json: bool) -> None:
    """Say why a run failed, and what to type next.

    RUN is a run folder of zerofit launch; LOG any log, such as Slurm's output; DIR a folder of logs, one per
    rank or node; - standard input. Also for runs that zerofit did not start. Secrets in the printed lines are
    masked.
    """
    found = explained(path)
    echo(explanation_json(found) if as_json else for_terminal(explanation_text(found)))


def explained(path: str) -> RunExplanation:
    """Return why a run failed, from a path or standard input.

    Raises:
        UserError: it can't be read, or has no log.
    """
    place = Path(path)
    try:
        if path == "-":
            found = explain_bytes(sys.stdin.buffer, "stdin")
        elif place.is_dir() and is_run_folder(place):
            return explain_run(place.resolve())
        else:
            is_folder = place.is_dir()
            found = explain_logs(logs_in(place) if is_folder else [place], root=place if is_folder else None)
        if not found.num_lines:
            raise UserError(
                "log-empty",
                "there is nothing to explain",
                found=f"no line in {', '.join(found.files) or path}",
                why="a run that failed says so in a line of its output",
                fix="name the file that has the run's output and its errors",
            )
        return RunExplanation(explanation=found, collectives=found.waits)
    except OSError as error:
        raise UserError(
            "log-not-readable",
            "the log can't be read",
            found=f"{error.filename or path}: {error.strerror}",
            why="zerofit explain needs a run folder, a log, a folder of logs, or - for standard input",
            fix="name one that exists and is readable",
        ) from None
