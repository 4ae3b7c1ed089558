"""A plan file that was made from a captured script, followed: for the same run, or held against another."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from zerofit.core.capture import masked
from zerofit.core.errors import UserError
from zerofit.core.plan import Origin
from zerofit.machine.versions import probe_versions
from zerofit.planning.make_problem import captured_problem_of
from zerofit.planning.plan_from_flags import choose
from zerofit.scripts.capture.with_progress import captured

if TYPE_CHECKING:
    from zerofit.core.capture import Capture
    from zerofit.core.plan import Plan
    from zerofit.core.request import Request
    from zerofit.launching.asked import Asked

_OF_SCRIPT = (Origin.SCRIPT, Origin.PLANNER)
"""Who spoke of the script that a plan was made from."""


def follow_plan(asked: Asked) -> tuple[Request, Capture | None]:
    """Return the request, and what the plan file's script was seen to train; None where nobody looked.

    A plan for the target with other arguments is followed where the script is seen to make the same batches
    of the same model.

    Args:
        asked: with a plan that was made from a capture.

    Raises:
        UserError: the target trains something else, or a flag can't be applied to it.
    """
    plan = asked.request.plan
    assert plan is not None
    assert plan.capture is not None
    capture = plan.capture
    if asked.has_plan_of_other_run:
        was, runs = (shlex.join(masked(target)) for target in (capture.target, asked.target))
        click.echo(f"zerofit: {asked.plan_file} was made for `{was}`, and `{runs}` is to run", err=True)
        if not asked.captures:
            return replace(asked.request, plan=_without_script(plan)), None
        without = "give --no-capture, to follow the plan file as it is"
        with captured(asked.target, limit_s=asked.capture_limit_s, instead=without) as run:
            _check_same(asked, capture, run.capture)
            capture = run.capture
    request = replace(asked.request, plan=_on_these_ranks(asked, plan, capture))
    captured_problem_of(  # refuses what can't be applied to the script
        asked.model,
        request=request,
        capture=capture,
        machine=asked.machine,
        versions=plan.versions,
        topology=_chosen(asked).topology,
    )
    return request, capture


def _chosen(asked: Asked) -> Plan:
    request = replace(asked.request, global_batch_size=None, plan=None)
    plan = asked.request.plan
    if plan is not None:
        bare = replace(plan, workload=replace(plan.workload, global_batch_size=None))
        request = replace(request, plan=bare)
    return choose(machine=asked.machine, versions=probe_versions(), request=request)


def _on_these_ranks(asked: Asked, plan: Plan, capture: Capture) -> Plan:
    """Return the plan with the global batch that the script makes on as many ranks as there are now."""
    ranks = _chosen(asked).topology.data_parallel_size
    if plan.workload.global_batch_size != capture.global_batch_size(plan.topology.data_parallel_size):
        return plan  # it was asked for
    workload = replace(plan.workload, global_batch_size=capture.global_batch_size(ranks))
    return replace(plan, workload=workload)


def _without_script(plan: Plan) -> Plan:
    """Return the plan without what it says of the script that it was made from."""
    reasons = tuple(reason for reason in plan.reasons if reason.origin not in _OF_SCRIPT)
    return replace(plan, capture=None, reasons=reasons)


def _check_same(asked: Asked, planned: Capture, seen: Capture) -> None:
    was, now = _shown(planned), _shown(seen)
    if was == now:
        return
    raise UserError(
        "plan-of-another-run",
        "the plan file is for what the script does not train",
        found=f"{asked.plan_file} is for {was}, and the script trains {now}",
        why="the micro-batch and the memory of a plan are those of one model and its batches",
        fix=f"plan anew, `zerofit plan --gpus SPEC --output {asked.plan_file}` with the same arguments; or "
        "give --no-capture, to follow the plan file as it is",
    )


def _shown(capture: Capture) -> str:
    model = capture.model
    name = f"{model.class_path.rpartition('.')[2]} of {model.facts.num_parameters:,} parameters"
    return f"{name} in batches of {capture.micro_batch_size} x {capture.passes_per_step}"
