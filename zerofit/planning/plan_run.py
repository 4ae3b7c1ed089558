"""Planner: one subject's traces and estimates for the verbs that plan, with progress shown on a terminal."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import click

from zerofit.checking.read_file import script_file
from zerofit.cli.output.plan_table import plan_table
from zerofit.configs.text import Unreadable
from zerofit.core.allocation_log import Trace
from zerofit.core.command import Route
from zerofit.core.errors import UserError
from zerofit.core.request import Request
from zerofit.machine.gpu_catalog import load_gpus
from zerofit.machine.library_versions import check_libraries_of_traces
from zerofit.machine.rates import catalog_rates, probe_rates
from zerofit.machine.versions import probe_versions
from zerofit.planning.estimate.closed_form.log import closed_form_log
from zerofit.planning.estimate_cache import KeptEstimates
from zerofit.planning.inputs import Loop
from zerofit.planning.make_problem import no_gpus_here, source_of
from zerofit.planning.plan_from_flags import choose
from zerofit.planning.solve import solve
from zerofit.planning.subject import NamedModel
from zerofit.planning.training_estimator import ClosedFormEstimator, TrainingEstimator

if TYPE_CHECKING:
    from zerofit.core.allocation_log import TraceRequest
    from zerofit.core.facts import Machine
    from zerofit.core.rates import Rates
    from zerofit.machine.machine_spec import SpecifiedMachine
    from zerofit.planning.answer import Answer
    from zerofit.planning.inputs import ModelFlags
    from zerofit.planning.problem import Problem
    from zerofit.planning.subject import Subject
    from zerofit.scripts.facts import ScriptFacts

DOES_NOT_FIT = 1
"""Exit code where no strategy fits."""


class Planner:
    """Plans for one subject; a context in which progress is shown.

    Args:
        subject: what is planned for.
        is_fast: whether closed forms take the place of traces.
    """

    def __init__(self, subject: Subject, *, is_fast: bool) -> None:
        self._subject = subject
        self._is_fast = is_fast
        self._progress: Any = None
        self._made: dict[tuple[TraceRequest, bool], Trace] = {}
        self._kept: list[KeptEstimates] = []

    def __enter__(self) -> Self:
        if not self._is_fast:
            check_libraries_of_traces()
        if not self._is_fast and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
        for kept in self._kept:
            kept.write()

    def answer(self, problem: Problem, *, is_here: bool, notes: tuple[str, ...] = ()) -> Answer:
        """Return the plan of a problem.

        Args:
            problem: what is to be planned.
            is_here: whether its machine is this one, for which there may be measured rates.
            notes: what was assumed of it.
        """
        rates = probe_rates(problem.machine) if is_here else catalog_rates()
        return solve(
            problem,
            estimator_of=lambda one: self._judge(one, rates),
            quick_estimator_of=None
            if self._is_fast
            else lambda one: ClosedFormEstimator(one, trace=self._closed_form, rates=rates),
            gpus=tuple(gpu.spec for gpu in load_gpus()),
            is_fast=self._is_fast,
            notes=(*notes, *self._subject.notes, *self._unchecked(problem)),
        )

    def _unchecked(self, problem: Problem) -> tuple[str, ...]:
        """Return what of the request names parts of the model, which closed forms do not know."""
        request = problem.request
        lora = request.lora or request.allowed_lora
        said = [f"--freeze {','.join(request.freeze)}"] if request.freeze else []
        if lora is not None and lora.target_modules:
            said.append(f"--lora-targets {','.join(lora.target_modules)}")
        if lora is not None and lora.modules_to_save:
            said.append(f"--lora-modules-to-save {','.join(lora.modules_to_save)}")
        if not self._is_fast or not said:
            return ()
        return (f"{' and '.join(said)} is in the model: --fast does not look, and a plan without it does",)

    def _judge(self, problem: Problem, rates: Rates) -> TrainingEstimator:
        if self._is_fast:
            return ClosedFormEstimator(problem, trace=self._closed_form, rates=rates)
        kept = KeptEstimates(problem, self._subject.identity)
        self._kept.append(kept)
        return TrainingEstimator(problem, trace=self._traced, rates=rates, devices=kept.estimates)

    def _closed_form(self, request: TraceRequest) -> Trace:
        key = request, True
        if key not in self._made:
            log = closed_form_log(self._subject.facts, request)
            self._made[key] = Trace(request=request, logs=(log,))
        return self._made[key]

    def _traced(self, request: TraceRequest) -> Trace:
        key = request, False
        if key not in self._made:
            kind = "with checkpointing" if request.gradient_checkpointing else "without checkpointing"
            title = f"tracing {self._subject.name} {kind}"
            task = self._progress.add_task(title, total=None) if self._progress else None

            def tell(what: str) -> None:
                if task is not None:
                    self._progress.update(task, description=f"{title}: {what}")

            self._made[key] = self._subject.trace(request, on_progress=tell)
            if task is not None:
                self._progress.remove_task(task)
        return self._made[key]


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
            found=f"{subject.said} on {topology.world_size} GPUs: {answer.head.shortage}",
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
    from zerofit.scripts.source.read_script import (
        read_script,  # only where there is a script: it takes its time
    )

    try:
        return read_script(source, name=script)
    except Unreadable:
        return None  # the check of the script says what is wrong
