"""zerofit plan: model, workload and machine to the fastest strategy that fits, and what the others need."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zerofit.cli.options import field_options, request_of
from zerofit.cli.parameters import CONTEXT, Number
from zerofit.cli.plan_options import (
    FixingVerb,
    machine_options,
    model_options,
    take_machine_flags,
    take_model_flags,
)
from zerofit.cli.plan_problem import machine_of, problem_of, source_of
from zerofit.cli.planner import DOES_NOT_FIT, Planner
from zerofit.cli.write_files import write_files
from zerofit.errors import UserError
from zerofit.plan import Topology, plan_to_json
from zerofit.probe.versions import probe_versions
from zerofit.render.plan_compare import plan_comparison
from zerofit.render.plan_json import plan_json
from zerofit.render.plan_table import machine_words, plan_table
from zerofit.render.plan_why import plan_why

if TYPE_CHECKING:
    from zerofit.cli.plan_options import MachineFlags, ModelFlags
    from zerofit.planning.answer import Answer
    from zerofit.request import Request


@click.command(cls=FixingVerb, context_settings=CONTEXT)
@model_options
@machine_options
@click.option(
    "--nodes", "--num-machines", "--nnodes", "num_nodes", type=Number(int, least=1), default=1, help="Nodes."
)
@click.option("--compare", metavar="SPECS", help="Several machines in place of --gpus: 8xA100-80G,1x4090.")
@click.option(
    "--fix",
    metavar="NAME=VALUE",
    expose_value=False,
    help="What the plan must keep to: the same as the flag of that name.",
)
@field_options
@click.option("--why", is_flag=True, help="Every reason, every term of every phase, with formula and source.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of the table.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the plan, for config --plan and launch --plan.",
)
@click.option("--force", is_flag=True, help="Write over a plan that differs.")
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw the strategies' memory into a file."
)
def plan(
    num_nodes: int,
    compare: str | None,
    why: bool,
    as_json: bool,
    output: Path | None,
    force: bool,
    plot: Path | None,
    **flags: Any,
) -> int:
    """Say what a run will need on each GPU and host, and choose the fastest strategy that fits.

    Needs no GPU: --gpus describes the machine. The flags of a strategy (--zero-stage 3, or
    --fix zero-stage=3) fix what the plan must keep to. Exits 1 where nothing fits.
    """
    model_flags, machine_flags = take_model_flags(flags), take_machine_flags(flags)
    request = request_of(plan_file=None, **flags)
    _check_together(compare, machine_flags, output, plot)
    if request.global_batch_size is None:
        raise _no_global_batch()
    if plot is not None:
        from zerofit.cli.draw_plot import check_can_plot

        check_can_plot(plot)
    if model_flags.is_fast:
        gc.disable()  # in half a second there is no rubbish worth looking for
    answers = _answers(model_flags, machine_flags, request, num_nodes=num_nodes, compare=compare)
    for answer in answers:
        where = f"{machine_words(answer)}: " if compare is not None else ""
        for note in answer.notes:
            click.echo(f"zerofit: assumed: {where}{note}", err=True)
    if output is not None and not answers[0].fits:
        click.echo(f"zerofit: nothing fits, so {output} is not written", err=True)
    elif output is not None:
        write_files({output: plan_to_json(answers[0].plan)}, force=force, flag="--output FILE")
    if plot is not None:
        from zerofit.cli.draw_plot import draw_plot
        from zerofit.render.plan_plot import plan_plot

        draw_plot(plan_plot(answers[0]), plot)
    click.echo(_text(answers, as_json=as_json, why=why, is_comparison=compare is not None))
    return 0 if any(answer.fits for answer in answers) else DOES_NOT_FIT


def _answers(
    model_flags: ModelFlags,
    machine_flags: MachineFlags,
    request: Request,
    *,
    num_nodes: int,
    compare: str | None,
) -> list[Answer]:
    specs: list[str | None] = [None]
    if compare is not None:
        specs = [part.strip() for part in compare.split(",") if part.strip()]
    machines = [machine_of(machine_flags, num_nodes=num_nodes, gpus=spec) for spec in specs]
    source, versions = source_of(model_flags), probe_versions()
    answers = []
    with Planner(source, is_fast=model_flags.is_fast) as planner:
        for spec, specified in zip(specs, machines, strict=True):
            topology = Topology(num_nodes=num_nodes, world_size=num_nodes * len(specified.machine.gpus))
            problem = problem_of(
                model_flags,
                request=request,
                source=source,
                machine=specified.machine,
                versions=versions,
                topology=topology,
            )
            is_here = spec is None and machine_flags.gpus is None
            answers.append(planner.answer(problem, is_here=is_here, notes=specified.assumptions))
    return answers


def _text(answers: list[Answer], *, as_json: bool, why: bool, is_comparison: bool) -> str:
    if as_json:
        return plan_json(answers)
    parts = [plan_comparison(answers) if is_comparison else plan_table(answers[0])]
    if why:
        parts += [plan_why(answer) for answer in answers]
    return "\n\n".join(parts)


def _check_together(
    compare: str | None, machine_flags: MachineFlags, output: Path | None, plot: Path | None
) -> None:
    if compare is None:
        return
    other = next(
        (
            flag
            for flag, value in (("--gpus", machine_flags.gpus), ("--output", output), ("--plot", plot))
            if value is not None
        ),
        None,
    )
    if other is not None or not compare.strip(" ,"):
        raise UserError(
            "compare-alone",
            "--compare names several machines, and a plan is for one",
            found=f"--compare {compare}" + (f" with {other}" if other else ""),
            why="it prints what each machine would do; a file or another --gpus belongs to one of them",
            fix="name the machines after --compare, and plan for the one you choose with --gpus",
        )


def _no_global_batch() -> UserError:
    return UserError(
        "global-batch-missing",
        "a plan needs the global batch",
        found="no --global-batch",
        why="it is what every strategy must make, in micro-batches times accumulation times ranks",
        fix="give --global-batch with the samples of one optimizer step over all GPUs",
    )
