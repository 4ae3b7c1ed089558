"""From a spec to the launch of a plan: captures, plans or follows a plan file, and refuses what can't run."""

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
from zerofit.launching.nodes import find_rendezvous
from zerofit.launching.start import PlannedLaunch
from zerofit.machine.versions import probe_versions
from zerofit.planning.plan_from_flags import choose, rehearsed
from zerofit.scripts.capture.errors import INSTEAD
from zerofit.scripts.capture.with_progress import captured
from zerofit.scripts.capture_summary import capture_lines
from zerofit.scripts.target import script_of, script_path

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from zerofit.core.capture import Capture
    from zerofit.core.facts import Machine, Versions
    from zerofit.core.observer import Observer
    from zerofit.core.plan import Plan
    from zerofit.planning.run_spec import RunSpec
    from zerofit.planning.subject import Subject
    from zerofit.scripts.capture.capture import CapturedScript

_SCRIPT_ORIGINS = (Origin.SCRIPT, Origin.PLANNER)
"""Origins of values that came from a plan's script."""


def prepare_launch(spec: RunSpec, observer: Observer) -> PlannedLaunch:
    """Return the plan, the script and the rendezvous.

    Raises:
        UserError: flags contradict each other, the script can't be captured, no plan can be made, nothing
            fits, or it can't run here.
    """
    return prepare_launches(spec, observer)[0]


def prepare_launches(spec: RunSpec, observer: Observer) -> tuple[PlannedLaunch, ...]:
    """Return the result of `prepare_launch`, followed by the requested number of fastest alternatives.

    Raises:
        UserError: as prepare_launch.
    """
    check_flags(spec)
    plans, capture = _plans(spec, observer)
    kept = None if capture is None else for_plan(capture)
    if not spec.is_elsewhere:
        check_nvme_path(plans[0])
    return tuple(_launch(spec, replace(plan, capture=kept)) for plan in plans)


def _launch(spec: RunSpec, plan: Plan) -> PlannedLaunch:
    rendezvous = find_rendezvous(spec.nodes, plan.topology)
    if is_on_one_of_many_gpus(plan):
        gpu_id = first_gpu(spec.nodes.gpu_ids, os.environ.get("CUDA_VISIBLE_DEVICES"))
        rendezvous = replace(rendezvous, gpu_ids=gpu_id)
    assert spec.target is not None
    return PlannedLaunch(plan=plan, target=spec.target, rendezvous=rendezvous)


def _plans(spec: RunSpec, observer: Observer) -> tuple[tuple[Plan, ...], Capture | None]:
    """Return the plan, alternatives to try, and their capture."""
    if spec.gpus is not None or spec.plans_for_script:
        from zerofit.planning.plan import ranks_to_plan  # imports many modules

        ranks_to_plan(spec, is_named=spec.gpus is not None)
    if spec.options.model is not None:
        return _plans_for_model(spec, observer), None
    if spec.plans_for_script:
        return _plans_for_script(spec, observer)
    capture = None
    if spec.plan is not None and spec.plan.capture is not None:
        spec, capture = _follow_plan(spec, observer)
    elif spec.lacks_micro_batch:
        spec, capture = _with_micro_batch(spec, observer)
    return (choose(machine=_node(spec), versions=probe_versions(), spec=spec),), capture


def _node(spec: RunSpec) -> Machine:
    assert spec.node is not None
    return spec.node


def _plans_for_model(spec: RunSpec, observer: Observer) -> tuple[Plan, ...]:
    from zerofit.planning.plan import check_plans_alone  # imported only if needed
    from zerofit.planning.subject import describe

    check_plans_alone(spec, on_cpu=spec.on_cpu and spec.is_here, rehearses=True)
    script = script_path(spec.target or ())
    named = describe(spec.options, versions=probe_versions(), script=script)
    return _plans_for(named, spec, observer)


def _plans_for_script(spec: RunSpec, observer: Observer) -> tuple[tuple[Plan, ...], Capture]:
    from zerofit.planning.sources.settings import check_model_flags
    from zerofit.planning.subject import captured_subject

    check_model_flags(spec.options)
    assert spec.machine is not None
    without = f"{INSTEAD}, or use only the flags: `--no-capture`"
    with _captured(spec, spec.machine.machine, observer, instead=without) as run:
        subject = captured_subject(run, engine="" if spec.files is None else spec.files.engine)
        observer.detail("\n".join(subject.lines))
        assert subject.capture is not None
        return _plans_for(subject, spec, observer), subject.capture


def _captured(
    spec: RunSpec, machine: Machine, observer: Observer, *, instead: str
) -> AbstractContextManager[CapturedScript]:
    """Capture the script, as on a machine with these GPUs."""
    return captured(
        spec.target or (),
        limit_s=spec.capture_limit_s,
        gpus=machine.gpus,
        own_folders=spec.own_folders,
        instead=instead,
        retry=spec.typed.with_capture_limit,
        observer=observer,
    )


def _plans_for(subject: Subject, spec: RunSpec, observer: Observer) -> tuple[Plan, ...]:
    """Return the plans for GPUs, as the ranks of this node run them."""
    from zerofit.planning.plan import plan_to_run  # imports many modules

    plans = plan_to_run(spec, subject, observer=observer)
    if spec.on_cpu:
        return tuple(rehearsed(plan, _node(spec)) for plan in plans)
    return tuple(replace(plan, machine=_node(spec)) for plan in plans)


def _with_micro_batch(spec: RunSpec, observer: Observer) -> tuple[RunSpec, Capture]:
    """Return the spec with the script's micro-batch size, to derive accumulation from, and the capture."""
    if not spec.captures:
        raise no_micro_batch(spec, found="--no-capture")
    without = "set --micro-batch-size, which needs no capture"
    with _captured(spec, _node(spec), observer, instead=without) as run:
        capture = run.capture
        observer.detail("\n".join(capture_lines(capture, is_cached=run.is_cached)))
    size = _micro_batch_size(spec, capture, probe_versions())
    if size is None:
        raise no_micro_batch(spec, found=f"{script_of(capture.target)} shows no batch size")
    return spec.setting("the script", micro_batch_size=size), capture


def _micro_batch_size(spec: RunSpec, capture: Capture, versions: Versions) -> int | None:
    """Return the script's samples per rank in one pass, on the ranks of a given strategy.

    Raises:
        UserError: a setting can't be applied to the script.
    """
    from zerofit.planning.make_problem import problem_of  # imports many modules
    from zerofit.planning.subject import subject_of_capture

    topology = _chosen(spec).topology
    problem = problem_of(
        spec, subject_of_capture(capture), machine=_node(spec), versions=versions, topology=topology
    )
    return problem.script.micro_batch_size if problem.script is not None else None


def _follow_plan(spec: RunSpec, observer: Observer) -> tuple[RunSpec, Capture | None]:
    """Return the spec for a plan file's script, and the capture; None if it is followed without one.

    A plan for the same script with other arguments is followed if its capture shows the same batches and
    model.
    """
    plan = spec.plan
    assert plan is not None
    assert plan.capture is not None
    capture = plan.capture
    if spec.has_plan_of_other_run:
        was, runs = (shlex.join(masked(target)) for target in (capture.target, spec.target or ()))
        observer.say(f"{spec.plan_file} was made for `{was}`, but this is `{runs}`")
        if not spec.captures:
            return replace(spec, plan=_without_script(plan)), None
        without = "use --no-capture, to follow the plan file unchanged"
        with _captured(spec, plan.machine, observer, instead=without) as run:
            _check_same(spec, capture, run.capture)
            capture = run.capture
    spec = replace(spec, plan=_on_these_ranks(spec, plan, capture))
    _micro_batch_size(spec, capture, plan.versions)
    return spec, capture


def _chosen(spec: RunSpec) -> Plan:
    spec = spec.setting(global_batch_size=None)
    if spec.plan is not None:
        bare = replace(spec.plan, workload=replace(spec.plan.workload, global_batch_size=None))
        spec = replace(spec, plan=bare)
    return choose(machine=_node(spec), versions=probe_versions(), spec=spec)


def _on_these_ranks(spec: RunSpec, plan: Plan, capture: Capture) -> Plan:
    """Return the plan with the script's global batch on the current number of ranks."""
    ranks = _chosen(spec).topology.data_parallel_size
    if plan.workload.global_batch_size != capture.global_batch_size(plan.topology.data_parallel_size):
        return plan  # it was requested
    workload = replace(plan.workload, global_batch_size=capture.global_batch_size(ranks))
    return replace(plan, workload=workload)


def _without_script(plan: Plan) -> Plan:
    """Return the plan without the facts of the script that it was made for."""
    reasons = tuple(reason for reason in plan.reasons if reason.origin not in _SCRIPT_ORIGINS)
    return replace(plan, capture=None, reasons=reasons)


def _check_same(spec: RunSpec, planned: Capture, seen: Capture) -> None:
    was, now = _shown(planned), _shown(seen)
    if was == now:
        return
    raise UserError(
        "plan-of-another-run",
        "the plan file is for another training",
        found=f"{spec.plan_file} is for {was}, and the script trains {now}",
        why="the micro-batch and the memory of a plan are for one model and its batches",
        fix=f"make a new plan, `zerofit plan --gpus SPEC --output {spec.plan_file}` with the same "
        "arguments; or "
        "use --no-capture, to follow the plan file unchanged",
    )


def _shown(capture: Capture) -> str:
    model = capture.model
    name = f"{model.class_path.rpartition('.')[2]} of {model.facts.num_parameters:,} parameters"
    return f"{name} in batches of {capture.micro_batch_size} x {capture.passes_per_step}"
