"""The flags of `zerofit launch` to what is to be run: captures, plans, chooses, refuses what can't be."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from zerofit.capture import capture_from_json
from zerofit.choose import asks_for_cpu, choose
from zerofit.cli.capturing import captured
from zerofit.cli.options import request_of
from zerofit.cli.plan_options import MachineFlags, ModelFlags, take_model_flags
from zerofit.errors import UserError
from zerofit.launcher.launch import Launch
from zerofit.launcher.nodes import Nodes, find_rendezvous, with_hostfile
from zerofit.launcher.run_folder import CAPTURE_FILE
from zerofit.plan import Origin, Reason
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
    from zerofit.plan import Plan
    from zerofit.request import Request

_NODE_FLAGS = (
    "num_nodes",
    "num_processes",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "gpu_ids",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
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
    def plans(self) -> bool:
        """Whether a plan is made from what the script is seen to train."""
        return self.captures and not self.brings_a_strategy and (not self.on_cpu or self.gpus is not None)

    @property
    def lacks_micro_batch(self) -> bool:
        """Whether there is a global batch to make, and no micro-batch to make it of."""
        request = self.request
        planned = request.plan.strategy.micro_batch_size if request.plan else None
        return request.global_batch_size is not None and not (request.micro_batch_size or planned)


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
    asked = _Asked(
        target=target,
        model=take_model_flags(flags),
        gpus=flags.pop("gpus"),
        captures=not flags.pop("no_capture"),
        capture_limit_s=flags.pop("capture_limit_s"),
        plan_file=flags["plan_file"],
        request=(request := request_of(**flags)),
        machine=probe_machine(gpu_ids=nodes.gpu_indices, may_be_unreadable=asks_for_cpu(request)),
    )
    if isinstance(ranks_per_node, str):  # torchrun's word for one rank a GPU
        ranks_per_node = 1 if asks_for_cpu(request) else max(1, len(asked.machine.gpus))
    nodes = replace(nodes, ranks_per_node=ranks_per_node)
    if hostfile is not None:
        nodes = with_hostfile(nodes, hostfile)
    request = replace(request, num_processes=nodes.world_size, num_nodes=nodes.num_nodes)
    request, capture = _planned(replace(asked, request=request))
    plan = choose(machine=asked.machine, versions=probe_versions(), request=request)
    _check_nvme_path(plan)
    rendezvous = find_rendezvous(nodes, plan.topology)
    if is_on_one_of_many_gpus(plan):
        gpu_id = first_gpu(nodes.gpu_ids, os.environ.get("CUDA_VISIBLE_DEVICES"))
        rendezvous = replace(rendezvous, gpu_ids=gpu_id)
    return Launch(plan=plan, target=target, rendezvous=rendezvous, capture=capture)


def _planned(asked: _Asked) -> tuple[Request, Capture | None]:
    """Return the request with a plan to start from, and what was captured; both where there is need."""
    _check_gpus(asked)
    by_model = asked.model.model is not None
    if by_model or asked.plans:
        _check_one_plan_for_all_nodes(asked)
        # only where it is needed: estimates are much code
        from zerofit.cli.plan_first import check_plans_alone, named_model, plan_first
        from zerofit.cli.plan_problem import check_model_flags
        from zerofit.cli.subject import CapturedRun
    specified = _specified(asked)
    is_fast, is_here = asked.model.is_fast, asked.gpus is None
    if by_model:
        check_plans_alone(asked.model, asked.request, on_cpu=asked.request.on_cpu and is_here)
        script = None if asked.target[0] == "-m" else asked.target[0]
        named = named_model(asked.model, script=script)
        request = plan_first(named, asked.request, specified, is_fast=is_fast, is_here=is_here)
        return _rehearsable(request), None
    if not asked.plans and not asked.lacks_micro_batch:
        return asked.request, _capture_beside(asked)
    if not asked.captures:
        raise _no_micro_batch(asked)
    if asked.plans:
        check_model_flags(asked.model)
    with captured(asked.target, limit_s=asked.capture_limit_s) as run:
        click.echo("\n".join(capture_lines(run.capture)), err=True)
        if not asked.plans:
            return _with_micro_batch(asked, run.capture), run.capture
        subject = CapturedRun(flags=asked.model, script=run)
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


def _capture_beside(asked: _Asked) -> Capture | None:
    """Return the capture that a plan file was made from, where it lies beside it and is of this target."""
    path = asked.plan_file.with_name(CAPTURE_FILE) if asked.plan_file is not None else None
    if path is None or not path.is_file():
        return None
    capture = capture_from_json(path.read_text(encoding="utf-8"), name=str(path))
    return capture if capture.target == asked.target else None


def _specified(asked: _Asked) -> SpecifiedMachine:
    """Return the machine that is planned for."""
    if asked.gpus is None:
        return SpecifiedMachine(machine=asked.machine, assumptions=())
    from zerofit.cli.plan_problem import machine_of

    flags = MachineFlags(
        gpus=asked.gpus, host_ram=None, nvme=None, cpu_cores=None, network=None, host_bandwidth=None
    )
    return machine_of(flags, num_nodes=asked.request.num_nodes or 1)


def _with_micro_batch(asked: _Asked, capture: Capture) -> Request:
    """Return the request with the script's own micro-batch, of which the global batch is to be made."""
    from zerofit.cli.plan_problem import captured_problem_of

    request, versions = asked.request, probe_versions()
    without = replace(request, global_batch_size=None)
    topology = choose(machine=asked.machine, versions=versions, request=without).topology
    problem = captured_problem_of(  # refuses what can't be applied to the script
        asked.model,
        request=request,
        capture=capture,
        machine=asked.machine,
        versions=versions,
        topology=topology,
    )
    size = problem.script.micro_batch_size if problem.script is not None else None
    if size is None:
        raise _no_micro_batch(asked, found=f"{script_of(capture.target)} shows no batch size")
    return replace(request, micro_batch_size=size)


def _no_micro_batch(asked: _Asked, *, found: str = "--no-capture") -> UserError:
    return UserError(
        "global-batch-needs-micro-batch",
        "the global batch needs the script's micro-batch",
        found=f"--global-batch-size {asked.request.global_batch_size} without --micro-batch-size; {found}",
        why="the global batch is made of micro-batches times accumulation times ranks",
        fix="give --micro-batch-size, the samples of one forward pass on each rank",
    )


def _check_gpus(asked: _Asked) -> None:
    if asked.gpus is None:
        return
    if not asked.request.on_cpu:
        raise UserError(
            "gpus-without-cpu",
            "a launch is on the GPUs that are here",
            found=f"--gpus {asked.gpus} without --cpu",
            why="GPUs of another machine can be planned for, and their ranks rehearsed on the CPU",
            fix="add --cpu for the rehearsal, or use `zerofit plan --gpus`",
        )
    if asked.brings_a_strategy or (not asked.captures and asked.model.model is None):
        preset = asked.request.preset
        other = (
            "--no-capture" if not asked.brings_a_strategy else f"--preset {preset}" if preset else "--plan"
        )
        raise UserError(
            "gpus-without-planning",
            "GPUs of another machine are for making a plan, and none is made here",
            found=f"--gpus {asked.gpus} with {other}",
            why="--gpus says for which machine to plan; the rehearsal itself runs on the CPU",
            fix=f"leave out --gpus, or {other}",
        )


def _check_one_plan_for_all_nodes(asked: _Asked) -> None:
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


def _check_nvme_path(plan: Plan) -> None:
    folder = plan.strategy.nvme_path
    if not plan.strategy.uses_nvme or folder is None:
        return
    if not os.path.isdir(folder):
        found = "it is no folder" if os.path.exists(folder) else "there is no such folder"
    elif not os.access(folder, os.W_OK | os.X_OK):
        found = "it is not writable"
    else:
        return
    raise UserError(
        "nvme-path-not-writable",
        "the folder for NVMe offload can't be used",
        found=f"--nvme-path {folder}: {found}",
        why="each rank writes what it offloads into files there",
        fix="name a writable folder on a local NVMe disk: --nvme-path DIR",
    )
