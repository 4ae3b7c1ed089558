"""The plan of a run on a cluster: made here, for the GPUs of its nodes, or given."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.core.capture import for_plan
from zerofit.core.errors import UserError
from zerofit.core.overrides import FLAGS
from zerofit.core.plan import GROUP_FLAGS
from zerofit.core.secrets import masked
from zerofit.machine.versions import probe_versions
from zerofit.planning.sources.settings import check_model_flags, check_none_ignored
from zerofit.scripts.capture.errors import INSTEAD
from zerofit.scripts.capture.limit import check_capture_limit
from zerofit.scripts.capture.with_progress import captured
from zerofit.scripts.target import script_path

if TYPE_CHECKING:
    from zerofit.core.observer import Observer
    from zerofit.core.plan import Plan
    from zerofit.planning.run_spec import RunSpec


def plan_for_cluster(spec: RunSpec, observer: Observer) -> Plan:
    """Return the plan of a run on a cluster: the given one, or one that is made here for its nodes.

    Raises:
        UserError: a flag contradicts the plan, nothing fits, or there is nothing to plan for.
    """
    from zerofit.planning.plan import (  # imports many modules
        check_plans_alone,
        on_machine,
        plan_to_run,
        ranks_to_plan,
    )
    from zerofit.planning.subject import captured_subject, describe

    if spec.plan is not None or spec.options.model is not None:
        check_capture_limit(spec.capture_limit_s, because="--plan" if spec.plan is not None else "--model")
    if spec.options.model is not None:
        check_plans_alone(spec, on_cpu=False, rehearses=True)
    if spec.plan is not None:
        return _given_plan(spec, spec.plan)
    if spec.gpus is None:
        raise UserError(
            "gpus-missing",
            "a plan for a cluster needs its GPUs",
            found="no --gpus and no --plan",
            why="the run is planned here, for the nodes it will use",
            fix="set the GPUs of one node: --gpus 8xH100",
        )
    target, spec = spec.target or (), on_machine(spec)
    ranks_to_plan(spec)
    if spec.options.model is not None:
        named = describe(spec.options, versions=probe_versions(), script=script_path(target))
        plan, *_ = plan_to_run(spec, named, observer=observer)
        return plan
    check_model_flags(spec.options)
    assert spec.machine is not None
    with captured(
        target,
        limit_s=spec.capture_limit_s,
        gpus=spec.machine.machine.gpus,
        instead=INSTEAD,
        retry=spec.typed.with_capture_limit,
        observer=observer,
    ) as run:
        subject = captured_subject(run, engine="" if spec.files is None else spec.files.engine)
        observer.detail("\n".join(subject.lines))
        plan, *_ = plan_to_run(spec, subject, observer=observer)
    return replace(plan, capture=for_plan(run.capture))


def _given_plan(spec: RunSpec, plan: Plan) -> Plan:
    """Return the given plan, if it is for this run and no other settings were given."""
    check_none_ignored(
        spec.options, because="--plan", instead="leave out --plan, for a plan that is made here"
    )
    fields = {name: getattr(plan.strategy, name) for name in FLAGS}
    fields |= {name: getattr(plan.topology, name) for name in GROUP_FLAGS}
    overrides = spec.overrides
    said = dict.fromkeys(  # a line's files may say what the plan was made with
        overrides.where(name)
        for name, value in fields.items()
        if overrides.has(name) and not (overrides.is_in_file(name) and overrides.get(name) == value)
    )
    if said:
        raise UserError(
            "plan-and-strategy",
            "the plan has a complete strategy",
            found=f"{', '.join(said)} with --plan",
            why="nodes follow the plan unchanged",
            fix=f"leave out {', '.join(said)}, or --plan for a plan that is made here",
        )
    num_nodes = overrides.get("num_nodes")
    if num_nodes not in (None, plan.topology.num_nodes):
        raise UserError(
            "plan-for-other-nodes",
            "the plan is for another number of nodes",
            found=f"--num-machines {num_nodes} with a plan for {plan.topology.num_nodes}",
            why="batches and memory of a plan depend on its number of ranks",
            fix="leave out --num-machines, or make a plan for this number",
        )
    if overrides.get("world_size") not in (None, plan.topology.world_size):
        raise UserError(
            "plan-for-other-ranks",
            "the plan is for another number of ranks",
            found=f"{overrides.where('world_size')} sets {overrides.get('world_size')} ranks, and the plan "
            f"is for {plan.topology.world_size}",
            why="batches and memory of a plan depend on its number of ranks",
            fix="leave the number out, or make a plan for it",
        )
    if spec.has_plan_of_other_run and plan.capture is not None:
        was, runs = (shlex.join(masked(target)) for target in (plan.capture.target, spec.target or ()))
        raise UserError(
            "plan-of-another-run",
            "the plan file is for another command line",
            found=f"it was made for `{was}`, but this is `{runs}`",
            why="the micro-batch and the memory of a plan are for one model and its batches",
            fix="leave out --plan, for a plan that is made here",
        )
    return plan
