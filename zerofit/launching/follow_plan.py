"""A plan file that was made from a captured script, followed: for the same run, or held against another."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.core.errors import UserError
from zerofit.core.plan import Origin
from zerofit.core.secrets import masked
from zerofit.machine.versions import probe_versions
from zerofit.planning.from_capture import problem_from_capture
from zerofit.planning.plan_from_flags import choose
from zerofit.scripts.capture.with_progress import captured

if TYPE_CHECKING:
    from zerofit.core.capture import Capture
    from zerofit.core.observer import Observer
    from zerofit.core.plan import Plan
    from zerofit.core.request import Request
    from zerofit.launching.request import LaunchRequest

_OF_SCRIPT = (Origin.SCRIPT, Origin.PLANNER)
"""Who spoke of the script that a plan was made from."""


def follow_plan(launch: LaunchRequest, observer: Observer) -> tuple[Request, Capture | None]:
    """Return the request, and the capture that belongs to it; None without a capture.

    A plan for the target with other arguments is followed where the script is seen to make the same batches
    of the same model.
    """
    plan = launch.request.plan
    assert plan is not None
    assert plan.capture is not None
    capture = plan.capture
    if launch.has_plan_of_other_run:
        was, runs = (shlex.join(masked(target)) for target in (capture.target, launch.target))
        observer.say(f"{launch.plan_file} was made for `{was}`, and `{runs}` is to run")
        if not launch.captures:
            return replace(launch.request, plan=_without_script(plan)), None
        without = "give --no-capture, to follow the plan file as it is"
        limit_s = launch.capture_limit_s
        with captured(
            launch.target, limit_s=limit_s, gpus=plan.machine.gpus, instead=without, observer=observer
        ) as run:
            _check_same(launch, capture, run.capture)
            capture = run.capture
    request = replace(launch.request, plan=_on_these_ranks(launch, plan, capture))
    problem_from_capture(  # refuses what can't be applied to the script
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
    """Return the plan with the global batch that the script makes on as many ranks as there are now."""
    ranks = _chosen(launch).topology.data_parallel_size
    if plan.workload.global_batch_size != capture.global_batch_size(plan.topology.data_parallel_size):
        return plan  # it was asked for
    workload = replace(plan.workload, global_batch_size=capture.global_batch_size(ranks))
    return replace(plan, workload=workload)


def _without_script(plan: Plan) -> Plan:
    """Return the plan without what it says of the script that it was made from."""
    reasons = tuple(reason for reason in plan.reasons if reason.origin not in _OF_SCRIPT)
    return replace(plan, capture=None, reasons=reasons)


def _check_same(launch: LaunchRequest, planned: Capture, seen: Capture) -> None:
    was, now = _shown(planned), _shown(seen)
    if was == now:
        return
    raise UserError(
        "plan-of-another-run",
        "the plan file is for what the script does not train",
        found=f"{launch.plan_file} is for {was}, and the script trains {now}",
        why="the micro-batch and the memory of a plan are those of one model and its batches",
        fix=f"plan anew, `zerofit plan --gpus SPEC --output {launch.plan_file}` with the same arguments; or "
        "give --no-capture, to follow the plan file as it is",
    )


def _shown(capture: Capture) -> str:
    model = capture.model
    name = f"{model.class_path.rpartition('.')[2]} of {model.facts.num_parameters:,} parameters"
    return f"{name} in batches of {capture.micro_batch_size} x {capture.passes_per_step}"
