"""plan: what a run needs on each GPU and host, and the fastest strategy that fits."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from zerofit.core.batch import split_global_batch
from zerofit.core.errors import UserError
from zerofit.core.observer import SILENT, Observer
from zerofit.core.plan import GROUP_FLAGS, Plan
from zerofit.core.request import Request
from zerofit.machine.versions import probe_versions
from zerofit.planning.inputs import CAPTURE_LIMIT_S, check_capture_limit, check_model_flags, settings_of
from zerofit.planning.make_plan import plan_of
from zerofit.planning.plan_from_flags import topology_of
from zerofit.planning.plan_table import answer_html, as_it_is_lines, command_with, decision_lines, plan_table
from zerofit.planning.planned_machine import machine_of, no_gpus_here
from zerofit.planning.planner import Planner
from zerofit.planning.problem import MemoryLimits
from zerofit.planning.ranks import check_ranks_of
from zerofit.planning.subject import CapturedRun, check_named, named_model
from zerofit.scripts.capture.errors import INSTEAD
from zerofit.scripts.capture.with_progress import captured
from zerofit.scripts.target import check_script, script_target

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zerofit.core.facts import GpuSpec, Machine
    from zerofit.core.plan import Topology
    from zerofit.machine.machine_spec import SpecifiedMachine
    from zerofit.planning.inputs import ModelFlags
    from zerofit.planning.solve import Answer
    from zerofit.planning.subject import Subject

_NO_LIMITS = MemoryLimits()
DOES_NOT_FIT = 1
"""Exit code where no strategy fits."""


class PlannedRun(Plan):
    """A Plan with the strategies that it was compared with; prints as the table of `zerofit plan`."""

    __slots__ = ("answer",)

    answer: Answer
    """The problem, every strategy that was considered, and what would help where nothing fits."""

    @classmethod
    def of(cls, answer: Answer) -> PlannedRun:
        """Return the plan of an answer."""
        made = cls(**{field.name: getattr(answer.plan, field.name) for field in fields(Plan)})
        object.__setattr__(made, "answer", answer)
        return made

    @property
    def fits(self) -> bool:
        """True where a strategy fits; else the plan is of the nearest."""
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
    """Return the fastest memory strategy that fits, with what each alternative needs and why it loses.

    `zerofit.plan("train.py", "--epochs", "3", gpus="8xA100-80G")` runs the script up to where its training
    would begin; `zerofit.plan(model="llama-3-8b", sequence_length=4096, global_batch_size=64, gpus="8xH100")`
    goes by the model's configuration. Nothing is trained, and no GPU is needed where `gpus` names them.

    Args:
        script: the script, or with `module` the module, that trains; None where `model` says what trains.
        arguments: the script's own.
        module: True where the script is a module, as with `python -m`.
        num_nodes: machines that take part, each with the GPUs that `gpus` names.
        capture_limit_s: how long the script may take to come to its training.
        observer: is told of progress and of assumptions; silent by default.
        settings: model and workload (`model`, `sequence_length`, `allow`, `is_fast` ...), machine (`gpus`,
            `host_ram` ...) and what the plan must keep to (`zero_stage=3`, `precision="bf16"`,
            `global_batch_size=64` ...): the flags of `zerofit plan`, see zerofit.planning.inputs.

    Returns:
        The plan; `.fits` is False where nothing fits, and the plan is then of the nearest strategy.

    Raises:
        UserError: something that was given is wrong, or no plan can be made.
        ExceptionGroup: of UserErrors, where what was fixed breaks compatibility rules.
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
    """Return what is planned for, and the answer for each of some machines.

    Args:
        target: the script or `-m module`, and its arguments; None where the flags name a model.
        machines: the nodes of one plan are all like its machine.
        is_here: True where the machine is this one, for which there may be measured rates.
        capture_limit_s: how long the script may take to come to its training.
        compares_layouts: True to look at every way to share samples.

    Raises:
        UserError: a flag can't be used, or no plan can be made.
    """
    answers, versions = [], probe_versions()
    gpus = machines[0].machine.gpus if machines else ()
    topologies = [ranks_to_plan(request, one.machine, num_nodes=num_nodes) for one in machines]
    with _subject(target, flags, limit_s=capture_limit_s, gpus=gpus, observer=observer) as subject:
        planner = Planner(subject, observer=observer)
        for specified, topology in zip(machines, topologies, strict=True):
            problem = subject.problem(
                request=request,
                machine=_used_by(topology, specified.machine),
                versions=versions,
                topology=topology,
            )
            answer = planner.answer(
                problem, is_here=is_here, notes=specified.assumptions, compares_layouts=compares_layouts
            )
            answers.append(answer)
    return subject, answers


def check_plannable(
    target: tuple[str, ...] | None, flags: ModelFlags, request: Request, *, capture_limit_s: float
) -> None:
    """Check that a model is named with its global batch where there is no script.

    Raises:
        UserError: one of the two is missing, or there is a limit for a capture that is not made.
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
            why="it is what every strategy must make, in micro-batches times accumulation times ranks",
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
    """Yield what is planned for; a captured script stays at hand for as long as the context."""
    if target is None:
        yield named_model(flags)
        return
    check_model_flags(flags)
    without = f"{INSTEAD}, without a script"
    with captured(target, limit_s=limit_s, gpus=gpus, instead=without, observer=observer) as script:
        yield CapturedRun(flags=flags, script=script)


def check_plans_alone(flags: ModelFlags, request: Request, *, on_cpu: bool, rehearses: bool) -> None:
    """Check that nothing beside --model brings a strategy, or needs none.

    Args:
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
    """Return the plan that a verb goes on with, and those of the fastest others where they are asked for.

    Its table is shown to the observer.

    Args:
        subject: the model, or what a script trains.
        is_here: True where the machine is this one, for which there may be measured rates.
        observer: is told of progress, assumptions and the table.
        limits: the memory that was not there in an earlier attempt of the run.
        num_fastest: how many of the fastest that fit to return behind the plan, each as a plan of its own;
            what runs were observed to need is left out then, as it is to be measured.

    Raises:
        UserError: there is no GPU, no plan can be made, or nothing fits.
    """
    machine = specified.machine
    if not machine.gpus:
        raise no_gpus_here(
            "say which GPUs the run will have, such as --gpus 8xA100-80G, or leave out --model"
        )
    topology = ranks_to_plan(request, machine, num_nodes=request.num_nodes, is_named=False)
    problem = subject.problem(
        request=request,
        machine=_used_by(topology, machine),
        versions=probe_versions(),
        topology=topology,
    )
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
    """Return the ranks to plan for, one a GPU where the request says nothing.

    Args:
        is_named: True for a machine that --gpus names.

    Raises:
        UserError: they do not divide over the nodes or into groups, there are fewer GPUs, or they do not make
            the global batch that the request names.
    """
    sizes = {name: getattr(request, name) for name in GROUP_FLAGS}
    ranks = Request(
        num_nodes=num_nodes,
        num_processes=request.num_processes,
        typed=request.typed,
        elsewhere=is_named,
        **sizes,
    )
    if is_named:
        check_ranks_of(ranks, machine)
    topology = topology_of(machine, ranks)
    if request.global_batch_size is not None:
        # Steps of a file, or without a micro-batch, may be those that the script makes itself.
        is_product = request.micro_batch_size and "gradient_accumulation_steps" not in request.said_by
        split_global_batch(
            global_batch_size=request.global_batch_size,
            micro_batch_size=request.micro_batch_size,
            gradient_accumulation_steps=request.gradient_accumulation_steps if is_product else None,
            data_parallel_size=topology.data_parallel_size,
        )
    return topology


def _used_by(topology: Topology, machine: Machine) -> Machine:
    """Return a machine with the GPUs that its ranks use."""
    return replace(machine, gpus=machine.gpus[: topology.ranks_per_node])


def _fix(answer: Answer) -> str:
    change = answer.suggestions[0].change if answer.suggestions else ""
    is_pasted = change.startswith("--") and answer.problem.request.typed[0]
    return command_with(change, answer.problem.request) if is_pasted else change
