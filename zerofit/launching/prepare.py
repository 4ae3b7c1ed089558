"""From a launch request to a plan: captures, plans or follows a plan file, and refuses what can't run."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.configs.write.command import first_gpu, is_on_one_of_many_gpus
from zerofit.core.capture import for_plan
from zerofit.core.errors import UserError
from zerofit.core.plan import Origin
from zerofit.core.secrets import masked
from zerofit.launching.checks import check_flags, check_nvme_path, no_micro_batch
from zerofit.launching.nodes import find_rendezvous, specified_machine
from zerofit.launching.start import PlannedLaunch
from zerofit.machine.machine_spec import SpecifiedMachine
from zerofit.machine.versions import probe_versions
from zerofit.planning.plan_from_flags import choose, rehearsed
from zerofit.scripts.capture.errors import INSTEAD
from zerofit.scripts.capture.with_progress import captured
from zerofit.scripts.capture_summary import capture_lines
from zerofit.scripts.target import script_of, script_path

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from zerofit.core.capture import Capture
    from zerofit.core.facts import Machine
    from zerofit.core.observer import Observer
    from zerofit.core.plan import Plan
    from zerofit.core.request import Request
    from zerofit.launching.request import LaunchRequest
    from zerofit.planning.subject import Subject
    from zerofit.scripts.capture.capture import CapturedScript

_SCRIPT_ORIGINS = (Origin.SCRIPT, Origin.PLANNER)
"""Origins of values that came from a plan's script."""


def prepare_launch(launch: LaunchRequest, observer: Observer) -> PlannedLaunch:
    """Return the plan, the script and the rendezvous.

    Raises:
        UserError: flags contradict each other, the script can't be captured, no plan can be made, nothing
            fits, or it can't run here.
    """
    return prepare_launches(launch, observer)[0]


def prepare_launches(launch: LaunchRequest, observer: Observer) -> tuple[PlannedLaunch, ...]:
    """Return the result of `prepare_launch`, followed by the requested number of fastest alternatives.

    Raises:
        UserError: as prepare_launch.
    """
    check_flags(launch)
    plans, capture = _plans(launch, observer)
    kept = None if capture is None else for_plan(capture)
    if not launch.is_elsewhere:
        check_nvme_path(plans[0])
    return tuple(_launch(launch, replace(plan, capture=kept)) for plan in plans)


def _launch(launch: LaunchRequest, plan: Plan) -> PlannedLaunch:
    rendezvous = find_rendezvous(launch.nodes, plan.topology)
    if is_on_one_of_many_gpus(plan):
        gpu_id = first_gpu(launch.nodes.gpu_ids, os.environ.get("CUDA_VISIBLE_DEVICES"))
        rendezvous = replace(rendezvous, gpu_ids=gpu_id)
    return PlannedLaunch(plan=plan, target=launch.target, rendezvous=rendezvous)


def _plans(launch: LaunchRequest, observer: Observer) -> tuple[tuple[Plan, ...], Capture | None]:
    """Return the plan, alternatives to try, and their capture."""
    specified = _specified(launch)
    if launch.model.model is not None:
        return _plans_for_model(launch, specified, observer), None
    if launch.plans_for_script:
        return _plans_for_script(launch, specified, observer)
    request, capture = launch.request, None
    if request.plan is not None and request.plan.capture is not None:
        request, capture = _follow_plan(launch, observer)
    elif launch.lacks_micro_batch:
        request, capture = _with_micro_batch(launch, observer)
    return (choose(machine=launch.machine, versions=probe_versions(), request=request),), capture


def _plans_for_model(
    launch: LaunchRequest, specified: SpecifiedMachine, observer: Observer
) -> tuple[Plan, ...]:
    from zerofit.planning.plan import check_plans_alone  # imported only if needed
    from zerofit.planning.subject import named_model

    is_here = launch.gpus is None
    check_plans_alone(launch.model, launch.request, on_cpu=launch.request.on_cpu and is_here, rehearses=True)
    named = named_model(launch.model, script=script_path(launch.target))
    return _plans_for(named, launch, specified, observer)


def _plans_for_script(
    launch: LaunchRequest, specified: SpecifiedMachine, observer: Observer
) -> tuple[tuple[Plan, ...], Capture]:
    from zerofit.planning.inputs import check_model_flags
    from zerofit.planning.subject import CapturedRun

    check_model_flags(launch.model)
    without = f"{INSTEAD}, or use only the flags: `--no-capture`"
    with _captured(launch, specified.machine, observer, instead=without) as run:
        engine = "" if launch.config_files is None else launch.config_files.engine
        subject = CapturedRun(flags=launch.model, script=run, engine=engine)
        observer.detail("\n".join(subject.lines))
        return _plans_for(subject, launch, specified, observer), subject.capture


def _captured(
    launch: LaunchRequest, machine: Machine, observer: Observer, *, instead: str
) -> AbstractContextManager[CapturedScript]:
    """Capture the script, as on a machine with these GPUs."""
    return captured(
        launch.target,
        limit_s=launch.capture_limit_s,
        gpus=machine.gpus,
        own_folders=launch.own_folders,
        instead=instead,
        observer=observer,
    )


def _plans_for(
    subject: Subject, launch: LaunchRequest, specified: SpecifiedMachine, observer: Observer
) -> tuple[Plan, ...]:
    """Return the plans for GPUs, as the ranks of this node run them."""
    from zerofit.planning.plan import plan_to_run  # imports many modules

    plans = plan_to_run(
        subject,
        launch.request,
        specified,
        is_here=launch.gpus is None,
        observer=observer,
        limits=launch.limits,
        num_fastest=launch.num_fastest,
    )
    if launch.request.on_cpu:
        return tuple(rehearsed(plan, launch.machine) for plan in plans)
    return tuple(replace(plan, machine=launch.machine) for plan in plans)


def _specified(launch: LaunchRequest) -> SpecifiedMachine:
    """Return the machine to plan for."""
    specified = SpecifiedMachine(machine=launch.machine, assumptions=())
    if launch.gpus is not None:
        specified = specified_machine(launch.elsewhere, nodes=launch.nodes)
    if launch.gpus is not None or launch.plans_for_script:
        from zerofit.planning.plan import ranks_to_plan  # imports many modules

        ranks_to_plan(
            launch.request,
            specified.machine,
            num_nodes=launch.request.num_nodes,
            is_named=launch.gpus is not None,
        )
    return specified


def _with_micro_batch(launch: LaunchRequest, observer: Observer) -> tuple[Request, Capture]:
    """Return the request with the script's micro-batch size, to derive accumulation from, and the capture."""
    from zerofit.planning.from_capture import problem_from_capture

    if not launch.captures:
        raise no_micro_batch(launch, found="--no-capture")
    without = "set --micro-batch-size, which needs no capture"
    with _captured(launch, launch.machine, observer, instead=without) as run:
        capture = run.capture
        observer.detail("\n".join(capture_lines(capture, is_cached=run.is_cached)))
    problem = problem_from_capture(  # refuses settings that can't be applied to the script
        capture,
        launch.model,
        request=launch.request,
        machine=launch.machine,
        versions=probe_versions(),
        topology=_chosen(launch).topology,
    )
    size = problem.script.micro_batch_size if problem.script is not None else None
    if size is None:
        raise no_micro_batch(launch, found=f"{script_of(capture.target)} shows no batch size")
    return replace(launch.request, micro_batch_size=size), capture


def _follow_plan(launch: LaunchRequest, observer: Observer) -> tuple[Request, Capture | None]:
    """Return the request for a plan file's script, and the capture; None if it is followed without one.

    A plan for the same script with other arguments is followed if its capture shows the same batches and
    model.
    """
    plan = launch.request.plan
    assert plan is not None
    assert plan.capture is not None
    from zerofit.planning.from_capture import problem_from_capture  # imports many modules

    capture = plan.capture
    if launch.has_plan_of_other_run:
        was, runs = (shlex.join(masked(target)) for target in (capture.target, launch.target))
        observer.say(f"{launch.plan_file} was made for `{was}`, but this is `{runs}`")
        if not launch.captures:
            return replace(launch.request, plan=_without_script(plan)), None
        without = "use --no-capture, to follow the plan file unchanged"
        with _captured(launch, plan.machine, observer, instead=without) as run:
            _check_same(launch, capture, run.capture)
            capture = run.capture
    request = replace(launch.request, plan=_on_these_ranks(launch, plan, capture))
    problem_from_capture(  # refuses settings that can't be applied to the script
        capture,
        launch.model,
        request=request,
        machine=launch.machine,
        versions=plan.versions,
        topology=_chosen(launch).topology,
    )
    return request, capture


def _chosen(launch: LaunchRequest) -> Plan:
    request = replace(launch.request, global_batch_size=None, plan=None)
    plan = launch.request.plan
    if plan is not None:
        bare = replace(plan, workload=replace(plan.workload, global_batch_size=None))
        request = replace(request, plan=bare)
    return choose(machine=launch.machine, versions=probe_versions(), request=request)


def _on_these_ranks(launch: LaunchRequest, plan: Plan, capture: Capture) -> Plan:
    """Return the plan with the script's global batch on the current number of ranks."""
    ranks = _chosen(launch).topology.data_parallel_size
    if plan.workload.global_batch_size != capture.global_batch_size(plan.topology.data_parallel_size):
        return plan  # it was requested
    workload = replace(plan.workload, global_batch_size=capture.global_batch_size(ranks))
    return replace(plan, workload=workload)


def _without_script(plan: Plan) -> Plan:
    """Return the plan without the facts of the script that it was made for."""
    reasons = tuple(reason for reason in plan.reasons if reason.origin not in _SCRIPT_ORIGINS)
    return replace(plan, capture=None, reasons=reasons)


def _check_same(launch: LaunchRequest, planned: Capture, seen: Capture) -> None:
    was, now = _shown(planned), _shown(seen)
    if was == now:
        return
    raise UserError(
        "plan-of-another-run",
        "the plan file is for another training",
        found=f"{launch.plan_file} is for {was}, and the script trains {now}",
        why="the micro-batch and the memory of a plan are for one model and its batches",
        fix=f"make a new plan, `zerofit plan --gpus SPEC --output {launch.plan_file}` with the same "
        "arguments; or "
        "use --no-capture, to follow the plan file unchanged",
    )


def _shown(capture: Capture) -> str:
    model = capture.model
    name = f"{model.class_path.rpartition('.')[2]} of {model.facts.num_parameters:,} parameters"
    return f"{name} in batches of {capture.micro_batch_size} x {capture.passes_per_step}"
