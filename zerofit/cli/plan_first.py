"""Plans before a verb goes on: `launch --model` and `config --model`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from zerofit.cli.plan_options import Loop
from zerofit.cli.plan_problem import no_gpus_here, problem_of, source_of
from zerofit.cli.planner import DOES_NOT_FIT, Planner
from zerofit.cli.read_file import script_file
from zerofit.command import Route
from zerofit.documents import Unreadable
from zerofit.errors import UserError
from zerofit.plan import Topology
from zerofit.probe.versions import probe_versions
from zerofit.render.plan_table import plan_table

if TYPE_CHECKING:
    from zerofit.cli.plan_options import ModelFlags
    from zerofit.facts import Machine
    from zerofit.request import Request
    from zerofit.script_facts import ScriptFacts


def plan_first(
    flags: ModelFlags, request: Request, machine: Machine, *, script: str | None = None
) -> Request:
    """Return a request that starts from the plan for this model on this machine.

    The plan's table goes to stderr. What the request fixes, the plan keeps to.

    Args:
        flags: what was said of model and workload.
        request: what was said of the strategy.
        machine: this one, or what was said of another.
        script: the file that will run; None where there is none yet.

    Raises:
        UserError: there is another plan or preset, no GPU, no plan can be made, or nothing fits.
    """
    other = f"--preset {request.preset}" if request.preset else "--plan" if request.plan else None
    if other or request.on_cpu:
        raise UserError(
            "model-and-strategy",
            "--model plans a strategy of its own",
            found=f"--model {flags.model} with {other or '--cpu'}",
            why="a preset or a plan brings a whole strategy" if other else "plans are for GPUs",
            fix=f"leave out --model, or {other or '--cpu'}",
        )
    if not machine.gpus:
        raise no_gpus_here(
            "leave out --model; --cpu rehearses, and `zerofit plan --gpus` plans for another machine"
        )
    source = source_of(flags)
    facts = None if script is None else _facts_of(script)
    if facts is not None and flags.loop is None and facts.route is Route.TRAINER:
        flags = replace(flags, loop=Loop.TRAINER)
    num_nodes = request.num_nodes or 1
    world_size = request.num_processes or num_nodes * len(machine.gpus)
    ranks = world_size // num_nodes
    if world_size % num_nodes or ranks > len(machine.gpus):
        return request  # `choose` says what is wrong with the ranks
    problem = problem_of(
        flags,
        request=request,
        source=source,
        machine=replace(machine, gpus=machine.gpus[:ranks]),
        versions=probe_versions(),
        topology=Topology(num_nodes=num_nodes, world_size=world_size),
        script=facts,
    )
    with Planner(source, is_fast=flags.is_fast) as planner:
        answer = planner.answer(problem, is_here=not request.elsewhere)
    for note in answer.notes:
        click.echo(f"zerofit: assumed: {note}", err=True)
    click.echo(plan_table(answer), err=True)
    if not answer.fits:
        raise UserError(
            "nothing-fits",
            "no strategy fits",
            found=f"--model {flags.model} on {world_size} GPUs: {answer.head.lacks}",
            why="zerofit does not start what will run out of memory",
            fix=answer.suggestions[0].change
            if answer.suggestions
            else "leave out --model to go on without a plan",
            exit_code=DOES_NOT_FIT,
        )
    return replace(
        request,
        plan=answer.plan,
        global_batch_size=None,
        micro_batch_size=None,
        gradient_accumulation_steps=None,
    )


def _facts_of(script: str) -> ScriptFacts | None:
    """Return what a script's source shows; None where it can't be read."""
    source = script_file(script).source
    if source is None:
        return None
    from zerofit.script_reading.read import read_script  # only where there is a script: it takes its time

    try:
        return read_script(source, name=script)
    except Unreadable:
        return None  # the check of the script says what is wrong
