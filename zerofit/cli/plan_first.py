"""Plans before a verb goes on: `launch SCRIPT`, `launch --model` and `config --model`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from zerofit.choose import choose
from zerofit.cli.plan_options import Loop
from zerofit.cli.plan_problem import no_gpus_here, source_of
from zerofit.cli.planner import DOES_NOT_FIT, Planner
from zerofit.cli.read_file import script_file
from zerofit.cli.subject import NamedModel
from zerofit.command import Route
from zerofit.documents import Unreadable
from zerofit.errors import UserError
from zerofit.probe.versions import probe_versions
from zerofit.render.plan_table import plan_table
from zerofit.request import Request

if TYPE_CHECKING:
    from zerofit.cli.plan_options import ModelFlags
    from zerofit.cli.subject import Subject
    from zerofit.facts import Machine
    from zerofit.probe.machine_spec import SpecifiedMachine
    from zerofit.script_facts import ScriptFacts


def named_model(flags: ModelFlags, *, script: str | None = None) -> NamedModel:
    """Return the model that --model names.

    Args:
        flags: what was said of model and workload.
        script: the file that will train it; None where there is none yet.

    Raises:
        UserError: there is none, or it can't be planned with the lengths that the flags give.
    """
    facts = None if script is None else _facts_of(script)
    if facts is not None and flags.loop is None and facts.route is Route.TRAINER:
        flags = replace(flags, loop=Loop.TRAINER)
    return NamedModel(flags=flags, source=source_of(flags), script=facts)


def check_plans_alone(flags: ModelFlags, request: Request, *, on_cpu: bool, rehearses: bool) -> None:
    """Return where nothing stands beside --model that brings a strategy, or needs none.

    Args:
        flags: what was said of the model.
        request: what was said of the strategy.
        on_cpu: whether the ranks run on the CPU, and no GPUs are named to plan for.
        rehearses: whether the verb runs on the CPU what is planned for GPUs that --gpus names.

    Raises:
        UserError: there is a preset or a plan, or the ranks run on the CPU.
    """
    other = f"--preset {request.preset}" if request.preset else "--plan" if request.plan else None
    if other or on_cpu:
        raise UserError(
            "model-and-strategy",
            "--model plans a strategy of its own",
            found=f"--model {flags.model} with {other or '--cpu'}",
            why="a preset or a plan brings a whole strategy" if other else "plans are for GPUs",
            fix="name the GPUs to plan for, `--cpu --gpus SPEC`, or leave out --model"
            if rehearses and not other
            else f"leave out --model, or {other or '--cpu'}",
        )


def check_ranks(request: Request, machine: Machine) -> None:
    """Return where a machine that --gpus names has a GPU for each rank.

    Raises:
        UserError: it has too few.
    """
    num_nodes, num_gpus = request.num_nodes or 1, len(machine.gpus)
    if (request.num_processes or 0) > num_nodes * num_gpus:
        raise UserError(
            "more-ranks-than-gpus",
            "there are fewer GPUs than ranks",
            found=f"--num-processes {request.num_processes} on {num_nodes} x {num_gpus} GPUs",
            why="each rank needs a GPU of its own",
            fix=f"name more GPUs in --gpus, or set --num-processes to at most {num_nodes * num_gpus}",
        )


def plan_first(
    subject: Subject, request: Request, specified: SpecifiedMachine, *, is_fast: bool, is_here: bool
) -> Request:
    """Return a request that starts from the plan for a subject on a machine.

    The plan's table goes to stderr. What the request fixes, the plan keeps to.

    Args:
        subject: the model, or what a script trains.
        request: what was said of the strategy.
        specified: the machine.
        is_fast: whether closed forms take the place of traces.
        is_here: whether the machine is this one, for which there may be measured rates.

    Raises:
        UserError: there is no GPU, no plan can be made, or nothing fits.
    """
    machine = specified.machine
    if not machine.gpus:
        raise no_gpus_here(
            "`--cpu --gpus SPEC` plans for the GPUs of another machine and rehearses that here; or leave out "
            "--model"
        )
    ranks = Request(num_processes=request.num_processes, num_nodes=request.num_nodes)
    topology = choose(machine=machine, versions=probe_versions(), request=ranks).topology
    problem = subject.problem(
        request=request,
        machine=replace(machine, gpus=machine.gpus[: topology.ranks_per_node]),
        versions=probe_versions(),
        topology=topology,
    )
    with Planner(subject, is_fast=is_fast) as planner:
        answer = planner.answer(problem, is_here=is_here, notes=specified.assumptions)
    for note in answer.notes:
        click.echo(f"zerofit: assumed: {note}", err=True)
    click.echo(plan_table(answer), err=True)
    if not answer.fits:
        instead = "leave out --model" if subject.capture is None else "give --no-capture"
        raise UserError(
            "nothing-fits",
            "no strategy fits",
            found=f"{subject.said} on {topology.world_size} GPUs: {answer.head.lacks}",
            why="zerofit does not start what will run out of memory",
            fix=answer.suggestions[0].change if answer.suggestions else f"{instead} to go on without a plan",
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
