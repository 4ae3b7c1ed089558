"""The flags of `zerofit launch` to what is to be run: captures, plans, chooses, refuses what can't be."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from zerofit.capture import for_plan, masked
from zerofit.choose import asks_for_cpu, choose
from zerofit.cli.capturing import captured
from zerofit.cli.launch_checks import check_flags, check_nvme_path, no_micro_batch
from zerofit.cli.options import request_of
from zerofit.cli.plan_options import MachineFlags, ModelFlags, take_model_flags
from zerofit.launcher.launch import Launch
from zerofit.launcher.nodes import Nodes, find_rendezvous, with_hostfile
from zerofit.plan import Origin, Reason
from zerofit.probe.capture_errors import INSTEAD
from zerofit.probe.machine import probe_machine
from zerofit.probe.machine_spec import SpecifiedMachine
from zerofit.probe.versions import probe_versions
from zerofit.render.capture_words import capture_lines, script_of
from zerofit.render.command import first_gpu, is_on_one_of_many_gpus
from zerofit.strategy import Precision

if TYPE_CHECKING:
    from pathlib import Path

    from zerofit.capture import Capture
    from zerofit.facts import Machine
    from zerofit.request import Request

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the flags ask for, and what is here."""

    target: tuple[str, ...]
    request: Request
    model: ModelFlags
    machine: Machine
    """This node."""
    gpus: str | None
    """GPUs of another machine that is rehearsed on the CPU."""
    captures: bool
    """Whether the script may be run to see what it trains."""
    capture_limit_s: float
    plan_file: Path | None

    @property
    def on_cpu(self) -> bool:
        """Whether the ranks run on the CPU."""
        return asks_for_cpu(self.request) or not self.machine.gpus

    @property
    def brings_a_strategy(self) -> bool:
        """Whether a preset or a plan file says what runs."""
        return self.request.preset is not None or self.request.plan is not None

    @property
    def plans_for_script(self) -> bool:
        """Whether a plan is made from what the script is seen to train."""
        is_open = self.model.model is None and self.captures and not self.brings_a_strategy
        return is_open and (not self.on_cpu or self.gpus is not None)

    @property
    def makes_a_plan(self) -> bool:
        """Whether a plan is made: from the script, or from --model."""
        return self.model.model is not None or self.plans_for_script

    @property
    def why_unplanned(self) -> str:
        """The flag because of which no plan is made."""
        if self.brings_a_strategy:
            return f"--preset {self.request.preset}" if self.request.preset else f"--plan {self.plan_file}"
        if not self.captures:
            return "--no-capture"
        return "--cpu" if asks_for_cpu(self.request) else "no GPU in sight"

    @property
    def lacks_micro_batch(self) -> bool:
        """Whether there is a global batch to make, and no micro-batch to make it of."""
        request = self.request
        planned = request.plan.strategy.micro_batch_size if request.plan else None
        return request.global_batch_size is not None and not (request.micro_batch_size or planned)

    @property
    def has_plan_of_other_run(self) -> bool:
        """Whether the plan file was made from another script than the target, or other arguments."""
        capture = self.request.plan.capture if self.request.plan is not None else None
        return capture is not None and masked(capture.target) != masked(self.target)

    @property
    def may_capture(self) -> bool:
        """Whether the script is run to look at it."""
        needs = self.plans_for_script or self.lacks_micro_batch or self.has_plan_of_other_run
        return self.captures and self.model.model is None and needs


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
        from zerofit.cli.follow_plan import follow_plan  # only where there is one: it brings much code

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
    from zerofit.cli.plan_first import check_plans_alone, named_model, plan_first

    is_here = asked.gpus is None
    check_plans_alone(asked.model, asked.request, on_cpu=asked.request.on_cpu and is_here, rehearses=True)
    named = named_model(asked.model, script=None if asked.target[0] == "-m" else asked.target[0])
    request = plan_first(named, asked.request, specified, is_fast=asked.model.is_fast, is_here=is_here)
    return _rehearsable(request)


def _planned_for_script(asked: Asked, specified: SpecifiedMachine) -> tuple[Request, Capture]:
    from zerofit.cli.plan_first import plan_first
    from zerofit.cli.plan_problem import check_model_flags
    from zerofit.cli.subject import CapturedRun

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
    from zerofit.cli.plan_first import check_ranks
    from zerofit.cli.plan_problem import machine_of

    flags = MachineFlags(
        gpus=asked.gpus, host_ram=None, nvme=None, cpu_cores=None, network=None, host_bandwidth=None
    )
    specified = machine_of(flags, num_nodes=asked.request.num_nodes or 1)
    check_ranks(asked.request, specified.machine)
    return specified


def _with_micro_batch(asked: Asked, capture: Capture) -> Request:
    """Return the request with the script's own micro-batch, of which the global batch is to be made."""
    from zerofit.cli.plan_problem import captured_problem_of

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
