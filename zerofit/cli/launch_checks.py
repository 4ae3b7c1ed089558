"""What `zerofit launch` refuses before anything is captured, planned or written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.cli.capturing import check_limit
from zerofit.cli.plan_options import check_none_ignored
from zerofit.core.errors import UserError
from zerofit.scripts.target import put_before, script_of

if TYPE_CHECKING:
    from zerofit.launching.asked import Asked


def check_flags(asked: Asked) -> None:
    """Return where the flags belong together, and none of them would be ignored.

    Raises:
        UserError: one would be, or the run can't be planned or started from them.
    """
    _check_gpus(asked)
    _check_planning_flags(asked)
    _check_plan_file(asked)
    if asked.makes_a_plan:
        _check_one_plan_for_all_nodes(asked)


def _check_gpus(asked: Asked) -> None:
    if asked.gpus is None:
        return
    if not asked.request.on_cpu:
        raise UserError(
            "gpus-without-cpu",
            "a launch is on the GPUs that are here",
            found=f"--gpus {asked.gpus} without --cpu",
            why="GPUs of another machine can be planned for, and their ranks rehearsed on the CPU",
            fix=put_before("--cpu", asked.target)
            or "add --cpu for the rehearsal, or use `zerofit plan --gpus`",
        )
    if not asked.makes_a_plan or asked.brings_a_strategy:
        other = asked.why_unplanned
        raise UserError(
            "gpus-without-planning",
            "GPUs of another machine are for making a plan, and none is made here",
            found=f"--gpus {asked.gpus} with {other}",
            why="--gpus says for which machine to plan; the rehearsal itself runs on the CPU",
            fix=f"leave out --gpus, or {other}",
        )


def _check_planning_flags(asked: Asked) -> None:
    """Refuse flags that only count where a plan is made, and a limit for a capture where there is none."""
    because = asked.why_unplanned
    if not asked.makes_a_plan:
        gpus = {"--cpu": "add --gpus SPEC", "no GPU in sight": "add --cpu --gpus SPEC"}.get(because)
        instead = f"{gpus}, the GPUs to plan for" if gpus else f"{because}, for a plan that is made here"
        check_none_ignored(asked.model, because=because, instead=instead)
    if not asked.may_capture:
        check_limit(asked.capture_limit_s, because=because if asked.model.model is None else "--model")


def _check_plan_file(asked: Asked) -> None:
    plan = asked.request.plan
    if plan is None or plan.topology.on_cpu or not asked.on_cpu or asked.request.on_cpu:
        return
    raise UserError(
        "plan-for-gpus",
        "the plan is for GPUs, and there is none here",
        found=f"--plan {asked.plan_file}, for {plan.topology.ranks_per_node} GPUs on each node",
        why="its ranks would train on the CPU, many times slower, and nobody asked for that",
        fix="start it on a node with GPUs, or add --cpu to rehearse it",
    )


def _check_one_plan_for_all_nodes(asked: Asked) -> None:
    num_nodes = asked.request.num_nodes or 1
    if num_nodes == 1:
        return
    said = f"--model {asked.model.model}" if asked.model.model is not None else script_of(asked.target)
    raise UserError(
        "nodes-need-one-plan",
        "several nodes need one plan, made once",
        found=f"{said} on {num_nodes} nodes without --plan",
        why="each node would plan by itself, and nodes whose plans differ wait for each other forever",
        fix=f"plan once, `zerofit plan --nodes {num_nodes} --gpus SPEC --output FILE` with the same script "
        "or model, and give --plan FILE on every node; or say --preset, or flags with --no-capture",
    )
