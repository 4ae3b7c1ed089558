"""plan: the fastest strategy that fits, with its memory on each GPU and host."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from zerofit.checking.check_run import refuse
from zerofit.checking.rules import OF_RANKS
from zerofit.checking.situation import RankCounts, Situation
from zerofit.core.batch import split_global_batch
from zerofit.core.errors import UserError
from zerofit.core.observer import SILENT, Observer
from zerofit.core.plan import GROUP_FLAGS, Plan
from zerofit.core.request import Request
from zerofit.machine.versions import probe_versions
from zerofit.planning.inputs import CAPTURE_LIMIT_S, check_capture_limit, check_model_flags, settings_of
from zerofit.planning.machine_from_flags import machine_of, no_gpus_here
from zerofit.planning.plan_from_flags import topology_of
from zerofit.planning.plan_reasons import plan_of
from zerofit.planning.plan_table import answer_html, as_it_is_lines, command_with, decision_lines, plan_table
from zerofit.planning.planner import Planner
from zerofit.planning.problem import MemoryLimits
from zerofit.planning.subject import CapturedRun, check_named, named_model
from zerofit.scripts.capture.errors import INSTEAD
from zerofit.scripts.capture.with_progress import captured
from zerofit.scripts.target import check_script, script_target

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zerofit.core.facts import GpuSpec, Machine, Versions
    from zerofit.core.plan import Topology
    from zerofit.machine.machine_spec import SpecifiedMachine
    from zerofit.planning.inputs import ModelFlags
    from zerofit.planning.problem import Problem
    from zerofit.planning.solve import Answer
    from zerofit.planning.subject import Subject

_NO_LIMITS = MemoryLimits()
DOES_NOT_FIT = 1
"""Exit code if no strategy fits."""


class PlannedRun(Plan):
    """A Plan with the strategies it was compared with; prints as the table of `zerofit plan`."""

    __slots__ = ("answer",)

    answer: Answer
    """The problem, every strategy that was considered, and suggestions if nothing fits."""

    @classmethod
    def of(cls, answer: Answer) -> PlannedRun:
        made = cls(**{field.name: getattr(answer.plan, field.name) for field in fields(Plan)})
        object.__setattr__(made, "answer", answer)
        return made

    @property
    def fits(self) -> bool:
        """True if a strategy fits; else the plan is of the nearest."""
        return self.answer.fits

    def __str__(self) -> str:
        first = as_it_is_lines(self.answer)
        return "\n".join([*first, *([""] if first else []), plan_table(self.answer)])

    def _repr_html_(self) -> str:
        return answer_html(self.answer)


def plan(
    script: str | None = None,
    *arguments: str,
    module: bool = False,
    num_nodes: int = 1,
    capture_limit_s: float = CAPTURE_LIMIT_S,
    observer: Observer = SILENT,
    **settings: Any,
) -> PlannedRun:
    """Return the fastest strategy that fits, with the memory of each alternative and why it lost.

    `zerofit.plan("train.py", "--epochs", "3", gpus="8xA100-80G")` runs the script up to where its training
    would begin; `zerofit.plan(model="llama-3-8b", sequence_length=4096, global_batch_size=64, gpus="8xH100")`
    uses the model's configuration. Nothing is trained, and with `gpus` no GPU is needed.

    Args:
        script: the training script, or with `module` the module; None if `model` is given.
        arguments: arguments of the script.
        module: True if the script is a module, as with `python -m`.
        num_nodes: number of nodes, each with the GPUs of `gpus`.
        capture_limit_s: time limit for the script to reach its training.
        observer: receives progress and assumptions; silent by default.
        settings: model and workload (`model`, `sequence_length`, `allow`, `is_fast` ...), machine (`gpus`,
            `host_ram` ...) and constraints (`zero_stage=3`, `precision="bf16"`, `global_batch_size=64` ...):
            the flags of `zerofit plan`, see zerofit.planning.inputs.

    Returns:
        The plan; if nothing fits, `.fits` is False and the plan is of the nearest strategy.

    Raises:
        UserError: a setting is wrong, or no plan can be made.
        ExceptionGroup: of UserErrors, if the settings break compatibility rules.
    """
    model_flags, machine_flags, request = settings_of(settings)
    target = None
    if script is not None:
        target = script_target(script, arguments, module=module)
        check_script(target)
    check_plannable(target, model_flags, request, capture_limit_s=capture_limit_s)
    machine = machine_of(machine_flags, num_nodes=num_nodes, target=target)
    _, (answer,) = plan_on_machines(
        target,
        model_flags,
        request,
        machines=[machine],
        num_nodes=num_nodes,
        is_here=machine_flags.gpus is None,
        capture_limit_s=capture_limit_s,
        observer=observer,
    )
    return PlannedRun.of(answer)


def plan_on_machines(
    target: tuple[str, ...] | None,
    flags: ModelFlags,
    request: Request,
    *,
    machines: Sequence[SpecifiedMachine],
    num_nodes: int,
    is_here: bool,
    capture_limit_s: float,
    observer: Observer,
    compares_layouts: bool = False,
) -> tuple[Subject, list[Answer]]:
    """Return the subject of the plans, and the answer for each machine.

    Args:
        target: the script or `-m module`, and its arguments; None if the flags name a model.
        machines: each is planned for separately, with num_nodes nodes like it.
        is_here: True if the machine is this one, for which there may be measured rates.
        capture_limit_s: time limit for the script to reach its training.
        compares_layouts: True to compare all layouts.

    Raises:
        UserError: a flag can't be used, or no plan can be made.
    """
    answers, versions = [], probe_versions()
    gpus = machines[0].machine.gpus if machines else ()
    topologies = [ranks_to_plan(request, one.machine, num_nodes=num_nodes) for one in machines]
    with _subject(target, flags, limit_s=capture_limit_s, gpus=gpus, observer=observer) as subject:
        planner = Planner(subject, observer=observer)
        for specified, topology in zip(machines, topologies, strict=True):
            problem = _problem(subject, request, specified.machine, topology, versions)
            answer = planner.answer(
                problem, is_here=is_here, notes=specified.assumptions, compares_layouts=compares_layouts
            )
            answers.append(answer)
    return subject, answers


def _problem(
    subject: Subject, request: Request, machine: Machine, topology: Topology, versions: Versions
) -> Problem:
    """Return the subject's problem on the GPUs of a machine that the ranks use."""
    used = replace(machine, gpus=machine.gpus[: topology.ranks_per_node])
    return subject.problem(request=request, machine=used, versions=versions, topology=topology)


def check_plannable(
    target: tuple[str, ...] | None, flags: ModelFlags, request: Request, *, capture_limit_s: float
) -> None:
    """Check that without a script, a model and a global batch are given.

    Raises:
        UserError: one of the two is missing, or a capture limit is given.
    """
    if target is not None:
        return
    check_named(flags)
    check_capture_limit(capture_limit_s, because="--model")
    if request.global_batch_size is None:
        raise UserError(
            "global-batch-missing",
            "a plan needs the global batch",
            found="no --global-batch-size",
            why="every strategy must make it: micro-batch x accumulation x ranks",
            fix="give --global-batch-size with the samples of one optimizer step over all GPUs",
        )


@contextmanager
def _subject(
    target: tuple[str, ...] | None,
    flags: ModelFlags,
    *,
    limit_s: float,
    gpus: tuple[GpuSpec, ...],
    observer: Observer,
) -> Iterator[Subject]:
    """Yield the model or the captured script, which stays loaded while the context lasts."""
    if target is None:
        yield named_model(flags)
        return
    check_model_flags(flags)
    without = f"{INSTEAD}, without a script"
    with captured(target, limit_s=limit_s, gpus=gpus, instead=without, observer=observer) as script:
        yield CapturedRun(flags=flags, script=script)


def check_plans_alone(flags: ModelFlags, request: Request, *, on_cpu: bool, rehearses: bool) -> None:
    """Check that no flag beside --model sets a whole strategy or makes a plan pointless.

    Args:
        on_cpu: True if the ranks run on the CPU and --gpus is not given.
        rehearses: True if the verb can run on the CPU what is planned for --gpus.

    Raises:
        UserError: a preset, a plan or the CPU is given.
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


def plan_to_run(
    subject: Subject,
    request: Request,
    specified: SpecifiedMachine,
    *,
    is_here: bool,
    observer: Observer,
    limits: MemoryLimits = _NO_LIMITS,
    num_fastest: int = 0,
) -> tuple[Plan, ...]:
    """Return the plan to run, followed by the plans of the fastest others if num_fastest is set.

    Args:
        subject: the model or the captured script.
        is_here: True if the machine is this one, for which there may be measured rates.
        observer: receives progress, assumptions and the table.
        limits: limits learned from an earlier attempt that was out of memory.
        num_fastest: how many of the fastest that fit to return after the plan, each as a plan of its own (the
            plan itself is not repeated); observations of earlier runs are then ignored, since these plans are
            to be measured.

    Raises:
        UserError: there is no GPU, no plan can be made, or nothing fits.
    """
    machine = specified.machine
    if not machine.gpus:
        raise no_gpus_here(
            "say which GPUs the run will have, such as --gpus 8xA100-80G, or leave out --model"
        )
    topology = ranks_to_plan(request, machine, num_nodes=request.num_nodes, is_named=False)
    problem = _problem(subject, request, machine, topology, probe_versions())
    problem = replace(problem, limits=limits)
    answer = Planner(subject, observer=observer).answer(
        problem,
        is_here=is_here,
        notes=specified.assumptions,
        num_fastest=num_fastest,
        learns=not num_fastest,
    )
    for note in answer.notes:
        observer.detail(f"zerofit: assumed: {note}")
    table = plan_table(answer, width=observer.width)
    if answer.fits:
        observer.show("\n".join(decision_lines(answer)))
        observer.detail(table)
    else:
        observer.show("\n".join([*as_it_is_lines(answer), table]))
        gpus = "1 GPU" if topology.world_size == 1 else f"{topology.world_size} GPUs"
        instead = "leave out --model" if subject.capture is None else "give --no-capture"
        raise UserError(
            "nothing-fits",
            "no strategy fits",
            found=f"{subject.said} on {gpus}: {answer.head.shortage}",
            why="zerofit does not start what will run out of memory",
            fix=_fix(answer) or f"{instead} to go on without a plan",
            exit_code=DOES_NOT_FIT,
        )
    others = (one for one in answer.found.fastest if one.strategy != answer.plan.strategy)
    return (
        answer.plan,
        *(plan_of(replace(answer.found, chosen=one), answer.problem) for one in others),
    )


def ranks_to_plan(
    request: Request, machine: Machine, *, num_nodes: int | None, is_named: bool = True
) -> Topology:
    """Return the ranks to plan for, by default one per GPU.

    Args:
        is_named: True for a machine given by --gpus.

    Raises:
        UserError: the ranks do not divide over the nodes or into groups, there are fewer GPUs, or they do not
            make the request's global batch.
    """
    sizes = {name: getattr(request, name) for name in GROUP_FLAGS}
    ranks = Request(
        num_nodes=num_nodes,
        num_processes=request.num_processes,
        typed=request.typed,
        elsewhere=is_named,
        **sizes,
    )
    if is_named and ranks.num_processes is not None:
        counts = RankCounts(
            world_size=ranks.num_processes,
            text=ranks.ranks_said,
            num_nodes=num_nodes or 1,
            gpus_per_node=len(machine.gpus),
            can_rehearse=False,
        )
        refuse(Situation(ranks=counts), rules=OF_RANKS)
    topology = topology_of(machine, ranks)
    if request.global_batch_size is not None:
        # Accumulation from a file, or without a micro-batch, may be the script's own.
        is_product = request.micro_batch_size and "gradient_accumulation_steps" not in request.said_by
        split_global_batch(
            global_batch_size=request.global_batch_size,
            micro_batch_size=request.micro_batch_size,
            gradient_accumulation_steps=request.gradient_accumulation_steps if is_product else None,
            data_parallel_size=topology.data_parallel_size,
        )
    return topology


def _fix(answer: Answer) -> str:
    change = answer.suggestions[0].change if answer.suggestions else ""
    is_pasted = change.startswith("--") and answer.problem.request.typed[0]
    return command_with(change, answer.problem.request) if is_pasted else change
