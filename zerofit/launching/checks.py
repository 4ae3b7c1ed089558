"""Checks of a launch: contradicting or ignored flags, an unusable NVMe folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.checking.inputs.named_files import resumed_from
from zerofit.core.checkpoints import incomplete_checkpoint, inspect_checkpoint, is_checkpoint
from zerofit.core.errors import UserError
from zerofit.machine.gpus import probe_driver, why_no_gpu
from zerofit.planning.options import MachineFlags
from zerofit.planning.sources.settings import check_none_ignored
from zerofit.scripts.capture.limit import check_capture_limit
from zerofit.scripts.target import put_before, script_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerofit.core.facts import Machine
    from zerofit.core.plan import Plan
    from zerofit.planning.run_spec import RunSpec


def check_nvme_path(plan: Plan) -> None:
    """Check that the folder for NVMe offload, if any, is writable."""
    folder = plan.strategy.nvme_path
    if not plan.strategy.uses_nvme or folder is None:
        return
    if not os.path.isdir(folder):
        found = "it is not a folder" if os.path.exists(folder) else "the folder does not exist"
    elif not os.access(folder, os.W_OK | os.X_OK):
        found = "it is not writable"
    else:
        return
    raise UserError(
        "nvme-path-not-writable",
        "the folder for NVMe offload can't be used",
        found=f"--nvme-path {folder}: {found}",
        why="each rank writes its offloaded data into files there",
        fix="name a writable folder on a local NVMe disk: --nvme-path DIR",
    )


def check_resumed_checkpoint(arguments: Sequence[str]) -> None:
    """Check that the checkpoint in a script's arguments is complete, by its files' sizes."""
    folder = resumed_from(arguments)
    if folder and is_checkpoint(Path(folder)):
        problem = inspect_checkpoint(Path(folder)).problem
        if problem is not None:
            raise incomplete_checkpoint(Path(folder), problem)


def no_micro_batch(spec: RunSpec, *, found: str) -> UserError:
    """Return the error for a global batch without a micro-batch."""
    size = spec.overrides.get("global_batch_size")
    return UserError(
        "global-batch-needs-micro-batch",
        "the global batch needs the script's micro-batch",
        found=f"--global-batch-size {size} without --micro-batch-size; {found}",
        why="the global batch is micro-batch x accumulation x ranks",
        fix="set --micro-batch-size, the samples of one forward pass on each rank",
    )


MOST_CPU_RANKS = 64
"""Ranks of one node on the CPU; each takes half a GiB before it trains. ASSUMPTION: more are a mistake."""


def check_num_ranks(plan: Plan, node: Machine | None) -> None:
    """Check that a node does not start more ranks than it can hold; a plan file may say any number.

    Args:
        plan: the plan; its `is_checked` tells whether the user wants it anyway.
        node: this node; None if it is not the one that runs the plan.
    """
    num_ranks, on_cpu = plan.topology.ranks_per_node, plan.topology.on_cpu
    most = MOST_CPU_RANKS if on_cpu else None if node is None else len(node.gpus)
    if most is None or num_ranks <= most or not plan.is_checked:
        return
    what = f"the CPU takes {most} at most" if on_cpu else f"it has {most} GPU{'s' * (most != 1)}"
    raise UserError(
        "too-many-ranks",
        "more ranks would start than this node can hold",
        found=f"{num_ranks} ranks on this node: {what}",
        why="each rank is a process with memory of its own" if on_cpu else "a GPU serves one rank",
        fix="correct --num-processes or the plan, or add --no-check to start them all the same",
    )


_DRY_RUN_HINT = "; `--dry-run --gpus 8xH100` shows what would run on such a node"


def check_gpu_is_here(machine: Machine, *, target: tuple[str, ...] = (), or_else: str = "") -> None:
    """Check that a run without --cpu has a GPU.

    Args:
        target: the script and its arguments, which may contain a misplaced --cpu.
        or_else: an alternative without a GPU.
    """
    if machine.gpus:
        return
    found, fix = why_no_gpu(visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"), driver=probe_driver())
    raise UserError(
        "no-gpu",
        "no GPU is visible on this node",
        found=found,
        why="the ranks would silently run on the CPU, many times slower",
        fix=put_before("--cpu", target) or f"{fix}; or add --cpu to run on the CPU{or_else}",
    )


def check_flags(spec: RunSpec) -> None:
    """Check that the flags don't contradict each other, and that none would be ignored."""
    _check_gpus(spec)
    if not spec.runs_on_cpu and spec.node is not None:
        check_gpu_is_here(spec.node, target=spec.target or (), or_else=_DRY_RUN_HINT)
    _check_planning_flags(spec)
    if spec.makes_a_plan:
        _check_one_plan_for_all_nodes(spec)


def _check_gpus(spec: RunSpec) -> None:
    if spec.gpus is None:
        if spec.described != MachineFlags():
            from zerofit.planning.machine_from_flags import machine_of  # imported only if needed

            machine_of(spec.described, num_nodes=1)  # refuses flags of a machine without its GPUs
        return
    if not spec.on_cpu and not spec.dry_run:
        raise UserError(
            "gpus-without-cpu",
            "a launch runs on local GPUs",
            found=f"--gpus {spec.gpus} without --cpu",
            why="for GPUs of another machine, zerofit can make a plan and test its ranks on the CPU",
            fix=put_before("--cpu", spec.target or ())
            or "add --cpu for the test, or --dry-run to see what would run there",
        )
    if spec.runs_on_cpu and (not spec.makes_a_plan or spec.has_given_strategy):
        other = spec.why_unplanned
        raise UserError(
            "gpus-without-planning",
            "GPUs of another machine are only for planning, and no plan is made here",
            found=f"--gpus {spec.gpus} with {other}",
            why="--gpus sets the machine to plan for; the run itself is on the CPU",
            fix=f"leave out --gpus, or {other}",
        )


def _check_planning_flags(spec: RunSpec) -> None:
    """Refuse flags that only apply if a plan is made, and a capture limit without a capture."""
    because = spec.why_unplanned
    if not spec.makes_a_plan:
        instead = (
            "add --gpus SPEC, the GPUs to plan for"
            if because == "--cpu"
            else f"{because}, for a plan that is made here"
        )
        check_none_ignored(spec.options, because=because, instead=instead)
    if not spec.may_capture:
        check_capture_limit(
            spec.capture_limit_s, because=because if spec.options.model is None else "--model"
        )


def _check_one_plan_for_all_nodes(spec: RunSpec) -> None:
    num_nodes = spec.overrides.get("num_nodes") or 1
    if num_nodes == 1:
        return
    said = f"--model {spec.options.model}" if spec.options.model is not None else script_of(spec.target or ())
    raise UserError(
        "nodes-need-one-plan",
        "several nodes need one plan, made once",
        found=f"{said} on {num_nodes} nodes without --plan",
        why="each node would plan separately, and nodes with different plans wait for each other forever",
        fix=f"plan once, `zerofit plan --num-machines {num_nodes} --gpus SPEC --output FILE` with the same "
        "script or model, and pass --plan FILE on every node; or use --preset, or flags with --no-capture",
    )
