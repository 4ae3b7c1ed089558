"""zerofit launch: the flags of a launch, its own or another launcher's; zerofit.launching does the work."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import click

from zerofit.cli.help_groups import GroupedVerb
from zerofit.cli.launch_lines import launch_line_options, resolve_line_flags
from zerofit.cli.options import (
    check_script_flags,
    gpu_ids_option,
    rendezvous_options,
    script_options,
    settings_from,
    strategy_options,
    trust_option,
)
from zerofit.cli.output.console import Console, echo, for_terminal, show_files
from zerofit.cli.output.explanation import short_lines
from zerofit.cli.parameters import CONTEXT, Number, Word, number_option
from zerofit.cli.plan_options import machine_options, model_options
from zerofit.cli.shared_options import capture_limit_option
from zerofit.core.plan import GENERATE_LIMIT_S
from zerofit.launching.explain_run import explain_run
from zerofit.launching.launch import launch as launch_script
from zerofit.launching.recover import RecoverMode
from zerofit.launching.run_folder import typed_name
from zerofit.machine.time_limit import TimeLimitReached, time_limit

_EXPLAIN_LIMIT_S = 10.0
"""Time to look for the cause of a failed run before the end. ASSUMPTION: 200 MB of log are read in it."""


@click.command(cls=GroupedVerb, context_settings={**CONTEXT, "allow_interspersed_args": False})
@strategy_options
@model_options
@rendezvous_options
@launch_line_options
@click.option(
    "--hostfile",
    type=click.Path(path_type=Path),
    hidden=True,
    help="DeepSpeed's list of nodes: HOST slots=N.",
)
@gpu_ids_option
@machine_options(gpus="Plan for other GPUs; with --dry-run or --cpu.")
@click.option("--no-capture", is_flag=True, help="Use only the flags; do not look at SCRIPT.")
@capture_limit_option
@number_option(
    "--generate-limit",
    "generate_limit_s",
    metavar="SECONDS",
    least=0,
    default=GENERATE_LIMIT_S,
    help="How long a rank waits in model.generate for the others, under ZeRO-3 and FSDP2; 0 is forever.",
)
@number_option(
    "--hang-limit",
    "hang_limit_s",
    metavar="SECONDS",
    least=0,
    help="End a run in which no rank makes progress for this long, and store all stacks; 0 is never. "
    "Default: 30 min; inside steps after the first 5 min, or 20 times the longest phase so far.",
)
@trust_option
@click.option(
    "--recover",
    type=Word("recover", RecoverMode),
    default=RecoverMode.AUTO.value,
    show_default=True,
    help="Out of memory: go on from the last checkpoint with another plan, ask first, or end.",
)
@number_option(
    "--max-recoveries", metavar="N", least=0, default=3, help="How many times a run may continue that way."
)
@number_option(
    "--max-lost-steps",
    metavar="N",
    least=0,
    default=100,
    help="Steps that may be repeated if SCRIPT can't resume and starts over.",
)
@click.option(
    "--tune",
    metavar="N",
    type=Number(int, least=0),
    default=0,
    help="First run the plan's best N strategies for a few steps, as `zerofit tune` does; use the fastest.",
)
@script_options(
    dry_run="Show plan and command, and train nothing; --verbose adds the files. SCRIPT still runs up to its "
    "training, unless --no-capture is given.",
    verbose="Print everything: capture, table and command.",
)
def launch(
    script: str,
    script_args: tuple[str, ...],
    module: bool,
    run_dir: Path,
    is_checked: bool,
    dry_run: bool,
    console: Console,
    trusts_checkpoint: bool,
    generate_limit_s: int,
    hang_limit_s: int | None,
    recover: RecoverMode,
    max_recoveries: int,
    max_lost_steps: int,
    tune: int,
    **flags: Any,
) -> int:
    """Train SCRIPT, unmodified, under the fastest memory strategy that fits.

    On GPUs the script first runs up to its first training step, so that the plan is for what it really
    trains; flags fix parts of the plan. --preset, --plan, --model, --no-capture and --cpu skip that.

    Flags after SCRIPT are the script's. SCRIPT may be a whole launch line. The exit code is the script's, or
    128 + its signal.
    """
    if recover is RecoverMode.ASK and not console.can_ask:
        console.say("--recover ask has no terminal to ask on: the run ends if memory runs out")
    check_script_flags(script, script_args)
    run = launch_script(
        script,
        *script_args,
        module=module,
        is_checked=is_checked,
        trusts_checkpoint=trusts_checkpoint,
        generate_limit_s=generate_limit_s,
        hang_limit_s=hang_limit_s,
        run_dir=run_dir,
        recover=recover,
        max_recoveries=max_recoveries,
        max_lost_steps=max_lost_steps,
        num_trials=tune,
        dry_run=dry_run,
        observer=console,
        **launch_settings(flags),
    )
    if run.exit_code is None:
        show_files(run.files if console.shows_details else {})
        echo(run.command)
        return 0
    if run.cause:
        with contextlib.suppress(OSError):  # a closed terminal
            end = f"zerofit: {run.cause}; its log and record are in {run.folder}"
            known = _known_cause(run.folder)
            echo(for_terminal(f"{end}\n{known}" if known else end), err=True)
    return run.exit_code


def launch_settings(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the flags of strategy, model and nodes as arguments of zerofit.launch."""
    flags["ranks_per_node"] = resolve_line_flags(flags)
    return {"captures": not flags.pop("no_capture"), **settings_from(flags)}


def _known_cause(folder: Path) -> str | None:
    """Return what is known about the cause of a failed run, within a time that nobody waits for in vain."""
    try:
        with time_limit(_EXPLAIN_LIMIT_S):
            return short_lines(explain_run(folder))
    except TimeLimitReached:
        why = f"not found in {_EXPLAIN_LIMIT_S:g} s"
    except OSError as error:
        why = f"its logs can't be read: {error.strerror}"
    return f"  cause: {why}; to look for it: zerofit explain {typed_name(folder)}"
