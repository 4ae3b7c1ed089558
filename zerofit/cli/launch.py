"""zerofit launch: capture, plan, write the run folder, run accelerate launch, watch, record."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import click

from zerofit.checking.check_run import stop_at_errors
from zerofit.checking.inputs.capture import with_capture
from zerofit.checking.inputs.strategy import situation_of_launch
from zerofit.checking.read_targets import probe_resumed, script_file
from zerofit.checking.targets import Targets
from zerofit.cli.capturing import capture_limit_option
from zerofit.cli.options import no_check_option, rendezvous_options, run_dir_option, strategy_options
from zerofit.cli.output.applied_table import applied_rows, applied_table
from zerofit.cli.output.report import head_lines
from zerofit.cli.parameters import CONTEXT, Number, Verb
from zerofit.cli.plan_options import model_options
from zerofit.configs.schemas.catalog import load_schemas
from zerofit.configs.write.command import is_on_one_of_many_gpus
from zerofit.core.plan import GENERATE_LIMIT_S
from zerofit.launching.plan import plan_launch
from zerofit.launching.run_folder import run_folder
from zerofit.launching.start import Launch, launch_command, launch_files, prepare_run, start
from zerofit.machine.library_versions import check_libraries, check_libraries_of
from zerofit.scripts.target import check_script


@click.command(cls=Verb, context_settings={**CONTEXT, "allow_interspersed_args": False})
@strategy_options
@model_options
@rendezvous_options
@click.option(
    "--nproc-per-node",
    "ranks_per_node",
    type=Number(int, least=1, words=("gpu", "auto")),
    help="Ranks on each node, or gpu for one a GPU.",
)
@click.option("--hostfile", type=click.Path(path_type=Path), help="DeepSpeed's list of nodes: HOST slots=N.")
@click.option("--gpu-ids", metavar="IDS", help="GPUs of this node to use, such as 0,2.")
@click.option(
    "--gpus", metavar="SPEC", help="With --cpu: plan for these GPUs, and rehearse their ranks on the CPU."
)
@click.option(
    "--no-capture", is_flag=True, help="Go by the flags alone, and do not look at what SCRIPT trains."
)
@capture_limit_option
@click.option(
    "--generate-limit",
    "generate_limit_s",
    metavar="SECONDS",
    type=Number(int, least=0),
    default=GENERATE_LIMIT_S,
    show_default=True,
    help="How long a rank may wait in model.generate until all call it, under ZeRO-3; 0 is for ever.",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as with python -m.")
@run_dir_option
@no_check_option
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print what would be written and run, and train nothing; to plan, SCRIPT still runs up to its "
    "training, but with --no-capture.",
)
@click.argument("script")
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
def launch(
    script: str,
    script_args: tuple[str, ...],
    module: bool,
    run_dir: Path,
    no_check: bool,
    dry_run: bool,
    generate_limit_s: int,
    **flags: Any,
) -> int:
    """Train SCRIPT, unmodified, under the fastest memory strategy that fits, through `accelerate launch`.

    On GPUs the script first runs up to where its training would begin, so that the plan is for what it
    really trains; flags say what the plan must keep to. --preset, --plan, --model or --no-capture do without,
    and so does --cpu.

    Flags before SCRIPT are zerofit's, all behind it are the script's own. The exit code is the script's;
    128 + N where signal N ended it.
    """
    check_script(script, module=module)
    check_libraries()
    to_launch = plan_launch((*(("-m",) if module else ()), script, *script_args), flags)
    plan = replace(to_launch.plan, is_checked=not no_check, generate_limit_s=generate_limit_s)
    to_launch = replace(to_launch, plan=plan)
    check_libraries_of(plan.strategy)
    _check_rules(to_launch, script=None if module else script, arguments=script_args)
    if dry_run:
        _print_dry_run(to_launch, run_folder(run_dir, target=script, at=datetime.now()))
        return 0
    folder = prepare_run(to_launch, runs=run_dir, at=datetime.now())
    _tell(to_launch)
    _say(f"run folder {folder.path}", f"command: {launch_command(to_launch, folder)}")
    verdict = start(to_launch, folder)
    if verdict.cause:
        _say(f"{verdict.cause}; its log and record are in {folder.path}")
    return verdict.exit_code


def _check_rules(to_launch: Launch, *, script: str | None, arguments: tuple[str, ...]) -> None:
    plan = to_launch.plan
    targets = Targets(
        files=(script_file(script),) if script else (),
        arguments=arguments,
        checkpoint=probe_resumed(arguments),
        schemas=load_schemas(plan.versions),
    )
    situation = situation_of_launch(plan, machine=plan.machine, targets=targets)
    if plan.capture is not None:
        situation = with_capture(situation, plan.capture)
    stop_at_errors(situation, no_check=not plan.is_checked, say=partial(click.echo, err=True))


def _print_dry_run(to_launch: Launch, folder: Any) -> None:
    _tell(to_launch)
    for path, text in launch_files(to_launch, folder).items():
        click.echo(f"# {path}\n{text}")
    click.echo(launch_command(to_launch, folder))


def _tell(to_launch: Launch) -> None:
    """Print the strategy, and every change to what the script says."""
    plan = to_launch.plan
    _say(*head_lines(plan))
    click.echo(applied_table(applied_rows(plan)), err=True)
    if is_on_one_of_many_gpus(plan):
        gpu_ids = to_launch.rendezvous.gpu_ids
        _say(f"one rank uses GPU {gpu_ids} alone: with more in sight Trainer would spread over them all")


def _say(*lines: str) -> None:
    for line in lines:
        click.echo(f"zerofit: {line}", err=True)
