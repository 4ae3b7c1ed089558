"""zerofit bench: measurements on this machine. `ladder` launches one strategy after another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zerofit.cli.completion import complete_gpus, complete_model
from zerofit.cli.draw_plot import check_can_plot
from zerofit.cli.options import gpu_ids_option
from zerofit.cli.output.console import Console, echo, for_terminal
from zerofit.cli.output.ladder_table import ladder_commands, ladder_json, ladder_table
from zerofit.cli.parameters import CONTEXT, TASK, Verb, VerbGroup, Word, number_option
from zerofit.cli.tune import budget_option, hang_limit_option
from zerofit.launching.ladder import (
    CPU_BATCH,
    CPU_MODEL,
    CPU_TRIALS,
    GPU_BATCH,
    GPU_MODEL,
    GPU_TRIALS,
    LENGTH,
    measure_ladder,
)
from zerofit.launching.run_folder import RUNS
from zerofit.launching.rungs import ON_MANY_RANKS, ON_ONE_RANK, rung_names

_NOTHING_MEASURED = 1
"""Exit code if no rung was measured."""


@click.group(cls=VerbGroup, context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure on this machine what zerofit predicts."""


@bench.command(
    cls=Verb, context_settings=CONTEXT, epilog=f"Rungs: {', '.join(rung_names())}; N is any number."
)
@click.option(
    "--model",
    metavar="NAME|FOLDER|FILE",
    shell_complete=complete_model,
    help=f"A model's config; weights are random. By default {GPU_MODEL}, on the CPU {CPU_MODEL}.",
)
@click.option("--task", type=TASK, help=TASK.listed("Task of the model's head."))
@click.option(
    "--rungs",
    help=f"Rungs, in the order of the ladder. By default {ON_ONE_RANK}; on several ranks {ON_MANY_RANKS}.",
)
@click.option("--alone", is_flag=True, help="Add each rung to the baseline, not to those before it.")
@number_option(
    "--batch-size",
    help=f"Samples per optimizer step on each rank; by default {GPU_BATCH}, on the CPU {CPU_BATCH}.",
)
@number_option("--seq-len", "sequence_length", default=LENGTH, help="Tokens per sample.")
@click.option(
    "--attention",
    type=Word("attention", {name: name for name in ("eager", "sdpa")}),
    default="eager",
    show_default=True,
    help="transformers' attention of the baseline; eager as in the published ladder.",
)
@number_option("--num-processes", help="Ranks; default: one per GPU.")
@gpu_ids_option
@click.option("--cpu", "on_cpu", is_flag=True, help="Rehearse on CPU ranks, ignoring GPUs.")
@click.option(
    "--gpus",
    metavar="SPEC",
    shell_complete=complete_gpus,
    help="With --cpu or --dry-run: GPUs to predict for, such as 8xA100-80G.",
)
@number_option(
    "--steps",
    "num_timed",
    help=f"Timed optimizer steps per rung; by default {GPU_TRIALS.num_timed}, on the CPU "
    f"{CPU_TRIALS.num_timed}.",
)
@number_option(
    "--warm-up",
    "num_warm_up",
    help=f"Optimizer steps before the timed ones; by default {GPU_TRIALS.num_warm_up}, on the CPU "
    f"{CPU_TRIALS.num_warm_up}.",
)
@budget_option
@click.option("--anew", "is_anew", is_flag=True, help="Repeat what an earlier start has measured.")
@hang_limit_option
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    default=RUNS,
    show_default=True,
    help="Folder of all run folders; the rungs' are in one of its own.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of the table.")
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), help="Plot memory and time to a file."
)
@click.option("--force", is_flag=True, help="Overwrite the plot.")
@click.option("--dry-run", is_flag=True, help="Print the launch command of each rung, and run nothing.")
def ladder(
    *,
    rungs: str | None,
    alone: bool,
    as_json: bool,
    plot: Path | None,
    force: bool,
    dry_run: bool,
    **settings: Any,
) -> int:
    """Measure memory and time of one strategy after another on this node, beside the prediction.

    Each rung is a `zerofit launch` of the same plain script, which trains a model with random weights, for
    some steps. A rung that fails or runs out of memory says why, and the others continue. The same command
    resumes an interrupted ladder. Exits 1 if no rung was measured.
    """
    if plot is not None:
        check_can_plot(plot, force=force)
    console = Console(shows_details=False)
    result = measure_ladder(
        rungs=rungs, is_cumulative=not alone, dry_run=dry_run, observer=console, **settings
    )
    if as_json:
        echo(ladder_json(result))
    elif dry_run:
        echo(ladder_commands(result))
    else:
        echo(for_terminal(ladder_table(result, width=console.width)))
    if dry_run:
        return 0
    if (stopped_by := result.trials.stopped_by) is not None:
        echo(f"zerofit: stopped by {stopped_by.name}; the same command continues", err=True)
        return 128 + stopped_by
    if plot is not None:
        from zerofit.cli.output.ladder_plot import draw_ladder

        draw_ladder(result, plot)
    return 0 if result.is_measured else _NOTHING_MEASURED
