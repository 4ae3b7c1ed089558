"""plan: the fastest strategy that fits, with its memory on each GPU and host."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from zerofit.checking.engine import refuse
from zerofit.checking.rules import OF_RANKS
from zerofit.checking.situation import RankCounts, Situation
from zerofit.core.batch import split_global_batch
from zerofit.core.errors import UserError
from zerofit.core.observer import SILENT, Observer
from zerofit.core.plan import Plan
from zerofit.machine.this_node import probe_machine
from zerofit.machine.versions import probe_versions
from zerofit.planning.answer_lines import COMMAND, answer_lines, command_with, hint_lines, launch_line
from zerofit.planning.machine_from_flags import machine_of, no_gpus_here
from zerofit.planning.make_problem import problem_of
from zerofit.planning.options import MachineFlags
from zerofit.planning.plan_from_flags import topology_of
from zerofit.planning.plan_reasons import plan_of
from zerofit.planning.plan_table import plan_table
from zerofit.planning.planner import Planner
from zerofit.planning.resolve import Verb, own_environment, resolve
from zerofit.planning.screen_table import first_screen, table_below, table_html
from zerofit.planning.solve import Answer
from zerofit.planning.sources.settings import check_model_flags
from zerofit.planning.subject import captured_subject, check_named, describe, needs_length
from zerofit.scripts.capture.errors import INSTEAD
from zerofit.scripts.capture.limit import CAPTURE_LIMIT_S, check_capture_limit
from zerofit.scripts.capture.with_progress import captured
from zerofit.scripts.target import script_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zerofit.core.facts import Versions
    from zerofit.core.plan import Topology
    from zerofit.planning.problem import Problem
    from zerofit.planning.run_spec import RunSpec
    from zerofit.planning.subject import Subject

DOES_NOT_FIT = 1
"""Exit code if no strategy fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintableAnswer(Answer):
    """An Answer that prints as `zerofit plan` does, with the table of all strategies."""

    def __str__(self) -> str:
        return f"{first_screen(self)}\n\n{table_below(self, shows_all=True, explains=True)}"

    def _repr_html_(self) -> str:
        return table_html(self)


@own_environment()
def plan(
    script: str | None = None,
    *arguments: str,
    module: bool = False,
    num_nodes: int | None = None,
    config_file: str | None = None,
    deepspeed_file: str | None = None,
    capture_limit_s: float = CAPTURE_LIMIT_S,
    observer: Observer = SILENT,
    **settings: Any,
) -> PrintableAnswer:
    """Find the fastest strategy that fits, with the memory of each alternative and why it lost.

    `zerofit.plan("train.py", "--epochs", "3", gpus="8xA100-80G")` runs the script up to where its training
    would begin; `zerofit.plan(model="llama-3-8b", sequence_length=4096, global_batch_size=64, gpus="8xH100")`
    uses the model's configuration. Nothing is trained, and with `gpus` no GPU is needed.

    Args:
        script: the training script, or with `module` the module; or the first word of a launch line, such as
            "accelerate". None if `model` is given.
        arguments: arguments of the script, or the rest of the line.
        module: True if the script is a module, as with `python -m`.
        num_nodes: number of nodes, each with the GPUs of `gpus`.
        config_file: of `accelerate config`; without `gpus` by default the one in accelerate's cache.
        deepspeed_file: DeepSpeed's JSON.
        capture_limit_s: time limit for the script to reach its training.
        observer: receives progress and assumptions; silent by default.
        settings: model and workload (`model`, `sequence_length`, `allow`, `is_fast` ...), machine (`gpus`,
            `host_ram` ...) and constraints (`zero_stage=3`, `precision="bf16"`, `global_batch_size=64` ...):
            the flags of `zerofit plan`, see zerofit.planning.sources.settings.

    Returns:
        The answer, which prints as the table of `zerofit plan`: `.plan` is the plan; if nothing fits, `.fits`
        is False and the plan is of the nearest strategy.

    Raises:
        UserError: a setting is wrong, or no plan can be made.
        ExceptionGroup: of UserErrors, if configuration files can't be read or the settings break
            compatibility rules.
    """
    spec = resolve(
        None if script is None else (script, *arguments),
        verb=Verb.PLAN,
        module=module,
        num_nodes=num_nodes,
        config_file=config_file,
        deepspeed_file=deepspeed_file,
        capture_limit_s=capture_limit_s,
        observer=observer,
        **settings,
    )
    check_plannable(spec)
    _, (answer,) = plan_on_machines(spec, [spec.described], observer=observer)
    return PrintableAnswer(**{field.name: getattr(answer, field.name) for field in fields(answer)})


def plan_on_machines(
    spec: RunSpec,
    machines: Sequence[MachineFlags],
    *,
    observer: Observer,
    compares_layouts: bool = False,
) -> tuple[Subject, list[Answer]]:
    """Return the subject of the plans, and the answer for each machine.

    Args:
        machines: each is planned for separately, with as many nodes like it as the spec has.
        compares_layouts: True to compare all layouts.

    Raises:
        UserError: a flag can't be used, or no plan can be made.
    """
    answers, versions = [], probe_versions()
    specs = [on_machine(replace(spec, described=described)) for described in machines]
    topologies = [ranks_to_plan(for_machine) for for_machine in specs]
    with _subject(specs[0], versions=versions, observer=observer) as subject:
        planner = Planner(subject, is_fast=spec.options.is_fast, observer=observer)
        for for_machine, topology in zip(specs, topologies, strict=True):
            problem = _problem(for_machine, subject, topology, versions)
            answers.append(planner.answer(problem, compares_layouts=compares_layouts, screens=True))
    return subject, answers


def on_machine(spec: RunSpec) -> RunSpec:
    """Return the spec with the machine that its flags describe, or this one.

    Raises:
        UserError: this machine has no GPU, or a flag can't be read.
    """
    num_nodes = spec.overrides.get("num_nodes") or 1
    return replace(spec, machine=machine_of(spec.described, num_nodes=num_nodes, target=spec.target))


def _problem(spec: RunSpec, subject: Subject, topology: Topology, versions: Versions) -> Problem:
    """Return the subject's problem on the GPUs of a machine that the ranks use."""
    assert spec.machine is not None
    machine = spec.machine.machine
    used = replace(machine, gpus=machine.gpus[: topology.ranks_per_node])
    return problem_of(spec, subject, machine=used, versions=versions, topology=topology)


def check_plannable(spec: RunSpec) -> None:
    """Check that a script is given, or a model and a global batch.

    Raises:
        UserError: both or neither are given, the global batch is missing, or there is a capture limit without
            a script.
    """
    if spec.target is not None:
        if spec.options.model is not None:
            raise _model_and_script(spec.target, spec.options.model)
        return
    check_named(spec.options)
    check_capture_limit(spec.capture_limit_s, because="--model")
    has_batch = spec.overrides.has("global_batch_size")
    if not has_batch or (spec.options.sequence_length is None and spec.described.gpus is None):
        check_none_missing(spec)
    if not has_batch:
        raise UserError(
            "global-batch-missing",
            "a plan needs the global batch",
            found="no --global-batch-size",
            why="every strategy must make it: micro-batch x accumulation x ranks",
            fix="give --global-batch-size with the samples of one optimizer step over all GPUs",
        )


_NEEDED = {
    "--seq-len": ("512", "activations grow with the length of the samples"),
    "--global-batch-size": ("64", "every strategy must make the global batch"),
    "--gpus": ("8xA100-80G", "there is no GPU on this machine to plan for"),
}
"""Flags that a plan of a model may lack: an example of each, and why it is needed."""


def check_none_missing(spec: RunSpec, *, needs_batch: bool = True) -> None:
    """Check that at most one of the flags that a plan of a model needs is missing.

    Args:
        needs_batch: False for a verb that plans without a global batch.

    Raises:
        UserError: several are; for one alone a later check has its own error.
    """
    model = spec.options.model or ""
    is_missing = {
        "--seq-len": spec.options.sequence_length is None and needs_length(spec.options),
        "--global-batch-size": needs_batch and not spec.overrides.has("global_batch_size"),
        "--gpus": spec.described == MachineFlags() and not probe_machine().gpus,
    }
    missing = [flag for flag, missing in is_missing.items() if missing]
    if len(missing) > 1:
        example = " ".join(f"{flag} {_NEEDED[flag][0]}" for flag in missing)
        raise UserError(
            "flags-missing",
            "a plan of a model needs more flags",
            found=", ".join([f"--model {model}", *(f"no {flag}" for flag in missing)]),
            why="; ".join(_NEEDED[flag][1] for flag in missing),
            fix=f"add them with your numbers, as in {example}",
        )


def _model_and_script(target: tuple[str, ...], model: str) -> UserError:
    return UserError(
        "model-and-script",
        "a plan is for a script or for a model",
        found=f"--model {model} with {script_of(target)}",
        why="the script determines the model",
        fix="leave one of the two out",
    )


@contextmanager
def _subject(spec: RunSpec, *, versions: Versions, observer: Observer) -> Iterator[Subject]:
    """Yield the model or the captured script, which stays loaded while the context lasts."""
    if spec.target is None:
        yield describe(spec.options, versions=versions)
        return
    check_model_flags(spec.options)
    with captured(
        spec.target,
        limit_s=spec.capture_limit_s,
        gpus=spec.machine.machine.gpus if spec.machine is not None else (),
        own_folders=spec.own_folders,
        instead=f"{INSTEAD}, without a script",
        retry=spec.typed.with_capture_limit,
        observer=observer,
    ) as run:
        yield captured_subject(run, engine=spec.files.engine if spec.files is not None else "")


def check_plans_alone(spec: RunSpec, *, on_cpu: bool, rehearses: bool) -> None:
    """Check that no flag beside --model sets a whole strategy or makes a plan pointless.

    Args:
        on_cpu: True if the ranks run on the CPU and --gpus is not given.
        rehearses: True if the verb can run on the CPU what is planned for --gpus.

    Raises:
        UserError: a preset, a plan or the CPU is given.
    """
    other = f"--preset {spec.preset}" if spec.preset else "--plan" if spec.plan else None
    if other or on_cpu:
        raise UserError(
            "model-and-strategy",
            "--model plans a strategy of its own",
            found=f"--model {spec.options.model} with {other or '--cpu'}",
            why="a preset or a plan brings a whole strategy" if other else "plans are for GPUs",
            fix="name the GPUs to plan for, `--cpu --gpus SPEC`, or leave out --model"
            if rehearses and not other
            else f"leave out --model, or {other or '--cpu'}",
        )


def plan_to_run(spec: RunSpec, subject: Subject, *, observer: Observer) -> tuple[Plan, ...]:
    """Return the plan to run, followed by the plans of the fastest others if the spec has num_fastest.

    Each of the others is a plan of its own. Observations of earlier runs are then ignored, since these plans
    are to be measured.

    Args:
        spec: with the machine to plan for.
        subject: the model or the captured script.
        observer: receives progress, assumptions and the table.

    Raises:
        UserError: there is no GPU, no plan can be made, or nothing fits.
    """
    assert spec.machine is not None
    if not spec.machine.machine.gpus:
        raise no_gpus_here(
            "say which GPUs the run will have, such as --gpus 8xA100-80G, or leave out --model"
        )
    topology = ranks_to_plan(spec, is_named=False)
    problem = _problem(spec, subject, topology, probe_versions())
    planner = Planner(subject, is_fast=spec.options.is_fast, observer=observer)
    answer = planner.answer(problem, num_fastest=spec.num_fastest, learns=not spec.num_fastest)
    for note in answer.notes:
        observer.detail(f"zerofit: assumed: {note}")
    table = plan_table(answer, width=observer.width)
    if answer.fits:
        observer.show("\n".join(answer_lines(answer)))
        if spec.dry_run and (line := launch_line(spec)):
            observer.show(f"{COMMAND}{line}")
        if hints := hint_lines(answer):
            observer.show("\n".join(hints))
        observer.detail(table)
    else:
        observer.show(first_screen(answer, width=observer.width))
        observer.detail(table)
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
    others = (c for c in answer.found.fastest if c.strategy != answer.plan.strategy)
    return (
        answer.plan,
        *(plan_of(replace(answer.found, chosen=other), answer.problem) for other in others),
    )


def ranks_to_plan(spec: RunSpec, *, is_named: bool = True) -> Topology:
    """Return the ranks to plan for, by default one per GPU of the spec's machine.

    Args:
        is_named: True for a machine given by --gpus.

    Raises:
        UserError: the ranks do not divide over the nodes or into groups, there are fewer GPUs, or they do not
            make the global batch.
    """
    assert spec.machine is not None
    machine, said = spec.machine.machine, spec.overrides
    if is_named and said.has("world_size"):
        counts = RankCounts(
            world_size=said.get("world_size"),
            text=spec.ranks_said,
            num_nodes=said.get("num_nodes") or 1,
            gpus_per_node=len(machine.gpus),
            can_rehearse=False,
        )
        refuse(Situation(ranks=counts), rules=OF_RANKS)
    # The plan is for GPUs, also where it is then rehearsed on the CPU.
    bare = replace(spec, plan=None, preset=None, on_cpu=False)
    topology = topology_of(machine, bare, has_these_gpus=not is_named)
    if said.has("global_batch_size"):
        # Accumulation from a file, or without a micro-batch, may be the script's own.
        is_product = said.has("micro_batch_size") and not said.is_in_file("gradient_accumulation_steps")
        split_global_batch(
            global_batch_size=said.get("global_batch_size"),
            micro_batch_size=said.get("micro_batch_size"),
            gradient_accumulation_steps=said.get("gradient_accumulation_steps") if is_product else None,
            data_parallel_size=topology.data_parallel_size,
        )
    return topology


def _fix(answer: Answer) -> str:
    if not answer.suggestions:
        return ""
    first = answer.suggestions[0]
    return command_with(first, answer.problem.spec) or first.change
