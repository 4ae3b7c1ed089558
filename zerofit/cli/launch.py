"""zerofit launch: the flags of a launch; zerofit.launching.launch does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zerofit.cli.capturing import capture_limit_option
from zerofit.cli.help_groups import GroupedVerb
from zerofit.cli.options import (
    no_check_option,
    rendezvous_options,
    request_of,
    run_dir_option,
    strategy_options,
    wide_option,
)
from zerofit.cli.output.console import Console
from zerofit.cli.parameters import CONTEXT, Number
from zerofit.cli.plan_options import model_options, take_model_flags
from zerofit.core.plan import GENERATE_LIMIT_S
from zerofit.launching.launch import launch_run
from zerofit.launching.nodes import Nodes

_OF_NODES = tuple(name for name in Nodes.__dataclass_fields__ if name != "ranks_per_node")


@click.command(cls=GroupedVerb, context_settings={**CONTEXT, "allow_interspersed_args": False})
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
    "--gpus",
    metavar="SPEC",
    help="Plan for these GPUs: with --dry-run to see what would run there, with --cpu to rehearse it here.",
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
    help="Print the decision and the command, with --verbose the files too, and train nothing; to plan, "
    "SCRIPT still runs up to its training, but with --no-capture.",
)
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but errors.")
@click.option(
    "-v", "--verbose", is_flag=True, help="Say all: what was captured, the plan's table, the command."
)
@wide_option
@click.argument("script")
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
def launch(
    script: str,
    script_args: tuple[str, ...],
    module: bool,
    run_dir: Path,
    no_check: bool,
    dry_run: bool,
    quiet: bool,
    verbose: bool,
    wide: bool,
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
    run = launch_run(
        (*(("-m",) if module else ()), script, *script_args),
        **asked_of(flags),
        is_checked=not no_check,
        generate_limit_s=generate_limit_s,
        run_dir=run_dir,
        dry_run=dry_run,
        observer=Console(is_quiet=quiet, shows_details=verbose, is_wide=wide),
    )
    if run.exit_code is None:
        for path, text in run.files.items() if verbose else ():
            click.echo(f"# {path}\n{text}")
        click.echo(run.command)
        return 0
    if run.cause:
        click.echo(f"zerofit: {run.cause}; its log and record are in {run.folder}", err=True)
    return run.exit_code


def asked_of(flags: dict[str, Any]) -> dict[str, Any]:
    """Return what flags say of a launch, as the arguments of launch_request beside the script."""
    ranks_per_node = flags.pop("ranks_per_node")
    rank_for_each_gpu = isinstance(ranks_per_node, str)  # torchrun's word for one rank a GPU
    model = take_model_flags(flags)
    return {
        "model": model,
        "nodes": Nodes(
            ranks_per_node=None if rank_for_each_gpu else ranks_per_node,
            **{name: flags.pop(name) for name in _OF_NODES},
        ),
        "rank_for_each_gpu": rank_for_each_gpu,
        "hostfile": flags.pop("hostfile"),
        "gpus": flags.pop("gpus"),
        "captures": not flags.pop("no_capture"),
        "capture_limit_s": flags.pop("capture_limit_s"),
        "plan_file": flags["plan_file"],
        "request": request_of(allow=model.allow, **flags),
    }
