"""zerofit tune: the flags of trials, and their table; zerofit.launching does the work."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from zerofit.cli.help_groups import GroupedVerb
from zerofit.cli.launch_lines import launch_line_options, resolve_line_flags
from zerofit.cli.options import (
    check_script_flags,
    gpu_ids_option,
    one_node_options,
    script_options,
    settings_from,
)
from zerofit.cli.output.console import Console, echo, for_terminal
from zerofit.cli.output.tuning import tuning_json, tuning_table
from zerofit.cli.parameters import CONTEXT, Parsed, number_option
from zerofit.cli.plan_options import machine_options, model_options
from zerofit.cli.shared_options import capture_limit_option
from zerofit.configs.write.write_files import file_exists, write_files
from zerofit.core.plan import plan_to_json
from zerofit.core.secrets import shell_words
from zerofit.launching.trials import TrialPolicy
from zerofit.launching.tune import PLAN
from zerofit.launching.tune import tune as tune_script

_DEFAULT = TrialPolicy()
_NOTHING_MEASURED = 1
"""Exit code if no trial was measured."""
_DURATION = re.compile(r"(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,9})s?)?")


def _duration_s(text: str) -> float:
    """Return the seconds of a time such as 10m, 1h30m or 90s; a number alone is seconds."""
    found = _DURATION.fullmatch(text.strip().lower())
    if found is None or not any(found.groups()):
        raise ValueError(text)
    hours, minutes, rest = (int(part or 0) for part in found.groups())
    return 3600.0 * hours + 60 * minutes + rest


_BUDGET = Parsed(
    "time",
    _duration_s,
    why="it must be a time in hours, minutes and seconds",
    fix="write it as in --budget 10m, --budget 1h30m or --budget 90s",
)

budget_option = click.option(
    "--budget", "budget_s", type=_BUDGET, help="Start no trial after this time, such as 10m or 1h30m."
)
hang_limit_option = number_option(
    "--hang-limit",
    "hang_limit_s",
    metavar="SECONDS",
    least=0,
    help="End a trial in which no rank makes progress for this long, as in zerofit launch.",
)


@click.command(
    cls=GroupedVerb,
    context_settings={**CONTEXT, "allow_interspersed_args": False},
    groups={"Trials": ("num_trials", "num_timed", "num_warm_up", "budget_s", "is_anew", "out", "as_json")},
)
@number_option(
    "--trials",
    "num_trials",
    metavar="N",
    default=_DEFAULT.num_trials,
    help="Maximum number of strategies to try; including those of an earlier start.",
)
@number_option(
    "--steps",
    "num_timed",
    metavar="N",
    default=_DEFAULT.num_timed,
    help="Timed optimizer steps per trial.",
)
@number_option(
    "--warm-up",
    "num_warm_up",
    metavar="N",
    default=_DEFAULT.num_warm_up,
    help="Optimizer steps before the timed ones.",
)
@budget_option
@click.option("--anew", "is_anew", is_flag=True, help="Repeat what an earlier start has measured.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the fastest plan, for launch --plan; it is also in the folder of the trials.",
)
@click.option("--force", is_flag=True, help="Overwrite an existing plan.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of the table.")
@one_node_options
@launch_line_options
@model_options
@gpu_ids_option
@machine_options(gpus="With --cpu or --dry-run: the GPUs to plan for.")
@capture_limit_option
@hang_limit_option
@script_options(dry_run="Print what could be tried, try nothing; SCRIPT is captured.")
def tune(
    script: str,
    script_args: tuple[str, ...],
    module: bool,
    out: Path | None,
    force: bool,
    as_json: bool,
    dry_run: bool,
    is_checked: bool,
    console: Console,
    **flags: Any,
) -> int:
    """Run the plan's best few strategies for a few steps each on this machine, and pick the fastest.

    Each trial launches SCRIPT, unmodified, and ends it after some optimizer steps. It saves no weights,
    sends nothing to trackers or the hub, and leaves your files as they were. The same command resumes an
    interrupted search. Exits 1 if nothing fits, or no trial was measured.
    """
    check_script_flags(script, script_args)
    if out is not None and out.exists() and not force:
        raise file_exists(str(out), flag="--out FILE")
    tuning = tune_script(
        script,
        *script_args,
        module=module,
        is_checked=is_checked,
        dry_run=dry_run,
        observer=console,
        ranks_per_node=resolve_line_flags(flags),
        **settings_from(flags),
    )
    launch, plan_file = tuning.launch, tuning.folder / PLAN
    if launch is not None and out is not None:
        write_files({out: plan_to_json(launch.plan)}, force=force, flag="--out FILE", is_private=True)
        plan_file = out
    echo(tuning_json(tuning) if as_json else for_terminal(tuning_table(tuning, width=console.width)))
    if dry_run:
        return 0
    if launch is not None and not as_json:
        words = ("zerofit", "launch", "--plan", str(plan_file), *launch.target)
        echo(f"\nto train like this: {shell_words(words)}")
    if tuning.stopped_by is not None:
        again = "the same command continues"
        echo(f"zerofit: stopped by {tuning.stopped_by.name}; {again}", err=True)
        return 128 + tuning.stopped_by
    return _NOTHING_MEASURED if launch is None else 0
