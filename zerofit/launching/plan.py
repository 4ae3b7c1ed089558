"""The flags of `zerofit launch` to what is to be run: captures, plans, chooses, refuses what can't be."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from zerofit.cli.launch_checks import check_flags
from zerofit.cli.options import request_of
from zerofit.cli.output.capture_words import capture_lines
from zerofit.cli.plan_options import take_model_flags
from zerofit.configs.write.command import first_gpu, is_on_one_of_many_gpus
from zerofit.core.capture import for_plan
from zerofit.core.plan import Origin, Reason
from zerofit.core.strategy import Precision
from zerofit.launching.asked import Asked
from zerofit.launching.checks import check_nvme_path, no_micro_batch
from zerofit.launching.nodes import Nodes, find_rendezvous, with_hostfile
from zerofit.launching.start import Launch
from zerofit.machine.machine_spec import SpecifiedMachine
from zerofit.machine.this_node import probe_machine
from zerofit.machine.versions import probe_versions
from zerofit.planning.inputs import MachineFlags
from zerofit.planning.plan_from_flags import asks_for_cpu, choose
from zerofit.scripts.capture.errors import INSTEAD
from zerofit.scripts.capture.with_progress import captured
from zerofit.scripts.target import script_of

if TYPE_CHECKING:
    from pathlib import Path

    from zerofit.core.capture import Capture
    from zerofit.core.request import Request

_NODE_FLAGS = (
    "num_nodes",
    "num_processes",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "gpu_ids",
)
_NO_GPUS = (
    "zerofit: no GPU is in sight: nothing is captured or planned, and the ranks run on the CPU as the flags "
    "say; `--cpu --gpus SPEC` plans for the GPUs of another machine and rehearses that here"
)


def plan_launch(target: tuple[str, ...], flags: dict[str, Any]) -> Launch:
    """Return what the command line says is to be run.

    Args:
        target: the script or `-m module`, and its arguments.
        flags: all others, by the names of their parameters.

    Raises:
        UserError: the script can't be captured, no plan can be made, nothing fits, or it can't be run here.
    """
    ranks_per_node = flags.pop("ranks_per_node")
    hostfile: Path | None = flags.pop("hostfile")
    nodes = Nodes(**{name: flags.pop(name) for name in _NODE_FLAGS})
    asked = Asked(
        target=target,
        model=(model := take_model_flags(flags)),
        gpus=flags.pop("gpus"),
        captures=not flags.pop("no_capture"),
        capture_limit_s=flags.pop("capture_limit_s"),
        plan_file=flags["plan_file"],
        request=(request := request_of(allow=model.allow, **flags)),
        machine=probe_machine(gpu_ids=nodes.gpu_indices, may_be_unreadable=asks_for_cpu(request)),
    )
    if isinstance(ranks_per_node, str):  # torchrun's word for one rank a GPU
        ranks_per_node = 1 if asks_for_cpu(request) else max(1, len(asked.machine.gpus))
    nodes = replace(nodes, ranks_per_node=ranks_per_node)
    if hostfile is not None:
        nodes = with_hostfile(nodes, hostfile)
    request = replace(request, num_processes=nodes.world_size, num_nodes=nodes.num_nodes)
    asked = replace(asked, request=request)
    check_flags(asked)
    request, capture = _planned(asked)
    plan = choose(machine=asked.machine, versions=probe_versions(), request=request)
    plan = replace(plan, capture=None if capture is None else for_plan(capture))
    check_nvme_path(plan)
    rendezvous = find_rendezvous(nodes, plan.topology)
    if is_on_one_of_many_gpus(plan):
        gpu_id = first_gpu(nodes.gpu_ids, os.environ.get("CUDA_VISIBLE_DEVICES"))
        rendezvous = replace(rendezvous, gpu_ids=gpu_id)
    return Launch(plan=plan, target=target, rendezvous=rendezvous)


def _planned(asked: Asked) -> tuple[Request, Capture | None]:
    """Return the request with a plan to start from, and what was captured; both where there is need."""
    specified = _specified(asked)
    if asked.model.model is not None:
        return _planned_for_model(asked, specified), None
    if asked.plans_for_script:
        return _planned_for_script(asked, specified)
    if asked.captures and not asked.machine.gpus and not asked.request.on_cpu and not asked.brings_a_strategy:
        click.echo(_NO_GPUS, err=True)
    if asked.request.plan is not None and asked.request.plan.capture is not None:
        from zerofit.launching.follow_plan import follow_plan  # only where there is one: it brings much code

        return follow_plan(asked)
    if not asked.lacks_micro_batch:
        return asked.request, None
    if not asked.captures:
        raise no_micro_batch(asked, found="--no-capture")
    without = "give --micro-batch-size, for which nothing has to be looked at"
    with captured(asked.target, limit_s=asked.capture_limit_s, instead=without) as run:
        click.echo("\n".join(capture_lines(run.capture, is_kept=run.is_kept)), err=True)
        return _with_micro_batch(asked, run.capture), run.capture


def _planned_for_model(asked: Asked, specified: SpecifiedMachine) -> Request:
    # only where it is needed: estimates are much code
    from zerofit.planning.plan_run import check_plans_alone, named_model, plan_first

    is_here = asked.gpus is None
    check_plans_alone(asked.model, asked.request, on_cpu=asked.request.on_cpu and is_here, rehearses=True)
    named = named_model(asked.model, script=None if asked.target[0] == "-m" else asked.target[0])
    request = plan_first(named, asked.request, specified, is_fast=asked.model.is_fast, is_here=is_here)
    return _rehearsable(request)


def _planned_for_script(asked: Asked, specified: SpecifiedMachine) -> tuple[Request, Capture]:
    from zerofit.planning.make_problem import check_model_flags
    from zerofit.planning.plan_run import plan_first
    from zerofit.planning.subject import CapturedRun

    check_model_flags(asked.model)
    without = f"{INSTEAD}, or let the flags alone say how it runs: `--no-capture`"
    with captured(asked.target, limit_s=asked.capture_limit_s, instead=without) as run:
        subject = CapturedRun(flags=asked.model, script=run)
        click.echo("\n".join(subject.lines), err=True)
        is_fast, is_here = asked.model.is_fast, asked.gpus is None
        request = plan_first(subject, asked.request, specified, is_fast=is_fast, is_here=is_here)
        return _rehearsable(request), run.capture


def _rehearsable(request: Request) -> Request:
    """Return a request whose plan CPU ranks can run, where it is to be rehearsed on them.

    accelerate refuses fp16 on a CPU (accelerate/accelerator.py, "fp16 mixed precision requires a GPU").
    """
    plan = request.plan
    if plan is None or not request.on_cpu or plan.strategy.precision is not Precision.FP16:
        return request
    why = "CPU ranks have no fp16, which the plan for the GPUs takes"
    reason = Reason(field="precision", value=Precision.FP32.value, origin=Origin.PLANNER, why=why)
    others = tuple(one for one in plan.reasons if one.field != "precision")
    strategy = replace(plan.strategy, precision=Precision.FP32)
    return replace(request, plan=replace(plan, strategy=strategy, reasons=(*others, reason)))


def _specified(asked: Asked) -> SpecifiedMachine:
    """Return the machine that is planned for."""
    if asked.gpus is None:
        return SpecifiedMachine(machine=asked.machine, assumptions=())
    from zerofit.planning.make_problem import machine_of
    from zerofit.planning.plan_run import check_ranks

    flags = MachineFlags(
        gpus=asked.gpus, host_ram=None, nvme=None, cpu_cores=None, network=None, host_bandwidth=None
    )
    specified = machine_of(flags, num_nodes=asked.request.num_nodes or 1)
    check_ranks(asked.request, specified.machine)
    return specified


def _with_micro_batch(asked: Asked, capture: Capture) -> Request:
    """Return the request with the script's own micro-batch, of which the global batch is to be made."""
    from zerofit.planning.make_problem import captured_problem_of

    without = replace(asked.request, global_batch_size=None)
    topology = choose(machine=asked.machine, versions=probe_versions(), request=without).topology
    problem = captured_problem_of(  # refuses what can't be applied to the script
        asked.model,
        request=asked.request,
        capture=capture,
        machine=asked.machine,
        versions=probe_versions(),
        topology=topology,
    )
    size = problem.script.micro_batch_size if problem.script is not None else None
    if size is None:
        raise no_micro_batch(asked, found=f"{script_of(capture.target)} shows no batch size")
    return replace(asked.request, micro_batch_size=size)
