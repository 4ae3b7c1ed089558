"""zerofit runs: local and submitted runs."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import click

from zerofit.cli.completion import complete_run
from zerofit.cli.output.console import echo, terminal_width
from zerofit.cli.output.html_page import check_can_write_page, write_page
from zerofit.cli.output.run_comparison import comparison_text, shown_run
from zerofit.cli.output.run_html import run_html
from zerofit.cli.parameters import CONTEXT, Number, Verb, VerbGroup
from zerofit.cli.shared_options import json_option, run_dir_option
from zerofit.configs.write.write_files import check_can_write, write_files
from zerofit.core.run_report import report_to_json
from zerofit.core.units import format_bytes
from zerofit.launching.clusters.follow import cancel, find_run, print_log, run_status, status_lines
from zerofit.launching.run_list import list_runs, remove_run, runs_to_prune
from zerofit.launching.run_report import run_report


@click.group(cls=VerbGroup, context_settings=CONTEXT)
def runs() -> None:
    """List, follow, cancel and remove local runs and those of `zerofit submit`.

    RUN is a run folder or its name; default: the newest run.
    """


@runs.command("status", cls=Verb)
@json_option
@run_dir_option
@click.argument("run", required=False, shell_complete=complete_run)
def status_of(run: str | None, run_dir: Path, as_json: bool) -> None:
    """Print the state of a run."""
    found = find_run(run, run_dir)
    echo(json.dumps(run_status(found), indent=2) if as_json else "\n".join(status_lines(found)))


@runs.command("logs", cls=Verb)
@click.option("-f", "--follow", "follows", is_flag=True, help="Follow the log until the run ends.")
@click.option(
    "--rank", type=Number(int, least=0), help="Log of this rank; default: of all nodes, or of rank 0."
)
@run_dir_option
@click.argument("run", required=False, shell_complete=complete_run)
def logs_of(run: str | None, run_dir: Path, rank: int | None, follows: bool) -> int:
    """Print the output of a run."""
    return print_log(find_run(run, run_dir), rank=rank, follows=follows)


@runs.command("cancel", cls=Verb)
@run_dir_option
@click.argument("run", shell_complete=complete_run)
def cancel_one(run: str, run_dir: Path) -> None:
    """Cancel a run."""
    echo(f"zerofit: {cancel(find_run(run, run_dir))}", err=True)


@runs.command("show", cls=Verb)
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write it to a file; one page for a browser, with every term and the cause.",
)
@click.option("--force", is_flag=True, help="Overwrite a file that is no page of zerofit's.")
@run_dir_option
@click.argument("run", required=False, shell_complete=complete_run)
def show(run: str | None, run_dir: Path, html: Path | None, force: bool) -> None:
    """Print what a run was predicted to need beside what it needed."""
    if html is not None:
        check_can_write_page(html, force=force)
    shown = shown_run(find_run(run, run_dir))
    if html is not None:
        write_page(html, run_html(shown))
    echo(comparison_text(shown, width=terminal_width()))


@runs.command("report", cls=Verb)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write it to this file, after it is shown.",
)
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@run_dir_option
@click.argument("run", required=False, shell_complete=complete_run)
def report_of(run: str | None, run_dir: Path, output: Path | None, force: bool) -> None:
    """Print what a run was predicted to need, and needed, to be published.

    One small JSON document: the model's shape, strategy, versions, GPUs, peaks, step time, recoveries and the
    cause's id. It contains no name, path, host, user or argument, and is sent nowhere.
    """
    if output is not None:
        check_can_write(output, force=force, flag="--output FILE")
    text = report_to_json(run_report(find_run(run, run_dir)))
    echo(text.rstrip("\n"))
    if output is not None:
        write_files({output: text}, force=force, flag="--output FILE")
        echo(f"zerofit: all of {output} is shown above", err=True)


@runs.command("list", cls=Verb)
@json_option
@run_dir_option
def list_all(run_dir: Path, as_json: bool) -> None:
    """List the runs of this machine: size, state and name, the oldest first."""
    found = list_runs(run_dir)
    if as_json:
        echo(json.dumps([run.as_json() for run in found], indent=2))
        return
    if found:
        echo(f"{'size':>10}  {'state':<9}  run")
    for run in found:
        echo(f"{format_bytes(run.num_bytes):>10}  {run.state:<9}  {run.folder.name}")


@runs.command("prune", cls=Verb)
@click.option("--older-than", type=Number(float, least=0), metavar="DAYS", help="Only runs older than this.")
@click.option("--keep-last", type=Number(int, least=0), metavar="N", help="Keep the newest N runs.")
@click.option("--keep-failed", is_flag=True, help="Keep runs that did not end with exit code 0.")
@click.option("--dry-run", is_flag=True, help="Print what would be removed; remove nothing.")
@run_dir_option
def prune(
    run_dir: Path, older_than: float | None, keep_last: int | None, keep_failed: bool, dry_run: bool
) -> None:
    """Remove folders of old runs.

    Runs that are still running are kept, and folders that contain checkpoints or other files than the run's
    records. With two limits, both must allow the removal.
    """
    if older_than is None and keep_last is None:
        message = "without a limit all runs would be removed: use --older-than DAYS, --keep-last N, or both"
        raise click.UsageError(message, click.get_current_context())
    pruning = runs_to_prune(
        list_runs(run_dir),
        now=datetime.now(),
        older_than_days=older_than,
        keep_last=keep_last,
        keep_failed=keep_failed,
    )
    for run in pruning.removed:
        if not dry_run:
            remove_run(run)
        echo(run.folder)
    for run, reason in pruning.spared:
        echo(f"zerofit: kept {run.folder.name}: {reason}", err=True)
    freed = format_bytes(sum(run.num_bytes for run in pruning.removed))
    verb = "would remove" if dry_run else "removed"
    echo(f"zerofit: {verb} {len(pruning.removed)} runs, {freed}", err=True)
