"""zerofit runs: how runs of this machine and submitted ones stand."""

from __future__ import annotations

from pathlib import Path

import click

from zerofit.cli.options import run_dir_option
from zerofit.cli.parameters import CONTEXT, Number, Verb
from zerofit.launching.clusters.follow import cancel, find_run, print_log, status_lines


@click.group(context_settings=CONTEXT)
def runs() -> None:
    """See and end runs: those of this machine, and those that `zerofit submit` has handed over.

    RUN is a run folder or its name; the newest run where it is left out.
    """


@runs.command("status", cls=Verb)
@run_dir_option
@click.argument("run", required=False)
def status_of(run: str | None, run_dir: Path) -> None:
    """Say how a run stands."""
    click.echo("\n".join(status_lines(find_run(run, run_dir))))


@runs.command("logs", cls=Verb)
@click.option("-f", "--follow", "follows", is_flag=True, help="Go on until the run ends.")
@click.option(
    "--rank", type=Number(int, least=0), help="The log of this rank; of all nodes, or of rank 0, without."
)
@run_dir_option
@click.argument("run", required=False)
def logs_of(run: str | None, run_dir: Path, rank: int | None, follows: bool) -> int:
    """Print what a run has printed."""
    return print_log(find_run(run, run_dir), rank=rank, follows=follows)


@runs.command("cancel", cls=Verb)
@run_dir_option
@click.argument("run")
def cancel_one(run: str, run_dir: Path) -> None:
    """End a run."""
    click.echo(f"zerofit: {cancel(find_run(run, run_dir))}", err=True)
