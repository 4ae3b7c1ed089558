"""zerofit launch: plan, write the run folder, run accelerate launch, watch, record."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zerofit.choose import asks_for_cpu, choose
from zerofit.cli.checked import no_check_option, stop_at_errors
from zerofit.cli.options import request_of, strategy_options
from zerofit.cli.parameters import CONTEXT, Number, Verb
from zerofit.cli.plan_options import model_options, take_model_flags
from zerofit.cli.read_file import script_file
from zerofit.cli.script import check_script
from zerofit.errors import UserError
from zerofit.launcher.launch import Launch, launch_command, launch_files, prepare_run, start
from zerofit.launcher.nodes import Nodes, find_rendezvous, with_hostfile
from zerofit.launcher.run_folder import run_folder
from zerofit.layers.of_launch import situation_of_launch
from zerofit.probe.catalog import load_schemas
from zerofit.probe.checkpoint import probe_resumed
from zerofit.probe.machine import probe_machine
from zerofit.probe.versions import probe_versions
from zerofit.render.command import first_gpu, is_on_one_of_many_gpus
from zerofit.render.plan_words import OPTIMIZER_WORDS
from zerofit.render.report import plan_lines
from zerofit.runtime.settings import unapplied
from zerofit.targets import Targets

if TYPE_CHECKING:
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


@click.command(cls=Verb, context_settings={**CONTEXT, "allow_interspersed_args": False})
@strategy_options
@model_options
@click.option("--machine-rank", "--node-rank", type=Number(int, least=0), help="This node's number, from 0.")
@click.option("--main-process-ip", "--master-addr", metavar="HOST", help="Address of node 0.")
@click.option(
    "--main-process-port",
    "--master-port",
    type=Number(int, least=0, most=65535),
    help="Port on node 0; 0 finds one.",
)
@click.option(
    "--nproc-per-node",
    "ranks_per_node",
    type=Number(int, least=1, words=("gpu", "auto")),
    help="Ranks on each node, or gpu for one a GPU.",
)
@click.option("--hostfile", type=click.Path(path_type=Path), help="DeepSpeed's list of nodes: HOST slots=N.")
@click.option("--gpu-ids", metavar="IDS", help="GPUs of this node to use, such as 0,2.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as with python -m.")
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    default=Path("zerofit-runs"),
    show_default=True,
    help="Folder of all run folders.",
)
@no_check_option
@click.option("--dry-run", is_flag=True, help="Print what would be written and run, and do nothing.")
@click.argument("script")
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
def launch(
    script: str,
    script_args: tuple[str, ...],
    module: bool,
    run_dir: Path,
    no_check: bool,
    dry_run: bool,
    hostfile: Path | None,
    **flags: Any,
) -> int:
    """Train SCRIPT under a memory strategy, unmodified, through `accelerate launch`.

    Flags before SCRIPT are zerofit's, all behind it are the script's own. The exit code is the script's;
    128 + N where signal N ended it.
    """
    check_script(script, module=module)
    to_launch = _plan_launch(hostfile, (*(("-m",) if module else ()), script, *script_args), flags)
    to_launch = replace(to_launch, plan=replace(to_launch.plan, is_checked=not no_check))
    _check_rules(to_launch.plan, script=None if module else script, arguments=script_args)
    if dry_run:
        _print_dry_run(to_launch, run_folder(run_dir, target=script, at=datetime.now()))
        return 0
    folder = prepare_run(to_launch, runs=run_dir, at=datetime.now())
    _say(
        *_lines(to_launch),
        f"run folder {folder.path}",
        f"command: {launch_command(to_launch, folder)}",
    )
    verdict = start(to_launch, folder)
    if verdict.cause:
        _say(f"{verdict.cause}; its log and record are in {folder.path}")
    return verdict.exit_code


def _plan_launch(hostfile: Path | None, target: tuple[str, ...], flags: dict[str, Any]) -> Launch:
    ranks_per_node = flags.pop("ranks_per_node")
    nodes = Nodes(**{name: flags.pop(name) for name in _NODE_FLAGS})
    model_flags = take_model_flags(flags)
    request = request_of(**flags)
    on_cpu = asks_for_cpu(request)
    machine = probe_machine(gpu_ids=nodes.gpu_indices, may_be_unreadable=on_cpu)
    if isinstance(ranks_per_node, str):  # torchrun's word for one rank a GPU
        ranks_per_node = 1 if on_cpu else max(1, len(machine.gpus))
    nodes = replace(nodes, ranks_per_node=ranks_per_node)
    if hostfile is not None:
        nodes = with_hostfile(nodes, hostfile)
    request = replace(request, num_processes=nodes.world_size, num_nodes=nodes.num_nodes)
    if model_flags.model is not None:
        from zerofit.cli.plan_first import plan_first  # only where it is needed: estimates are much code

        script = None if target[0] == "-m" else target[0]
        said, request = request, plan_first(model_flags, request, machine, script=script)
        _warn_of_what_the_script_must_do(said, request.plan)
    _check_micro_batch(request)
    plan = choose(machine=machine, versions=probe_versions(), request=request)
    _check_nvme_path(plan)
    rendezvous = find_rendezvous(nodes, plan.topology)
    if is_on_one_of_many_gpus(plan):
        gpu_id = first_gpu(nodes.gpu_ids, os.environ.get("CUDA_VISIBLE_DEVICES"))
        rendezvous = replace(rendezvous, gpu_ids=gpu_id)
    return Launch(plan=plan, target=target, rendezvous=rendezvous)


def _warn_of_what_the_script_must_do(said: Request, plan: Plan | None) -> None:
    """Say loudly what a plan counts on and no launcher can bring about."""
    if plan is None:
        return
    strategy = plan.strategy
    needs = []
    if said.micro_batch_size is None:
        needs.append(f"takes micro-batches of {strategy.micro_batch_size}")
    if strategy.gradient_checkpointing:
        needs.append("switches gradient checkpointing on")
    if strategy.optimizer is not None:
        needs.append(f"steps with {OPTIMIZER_WORDS[strategy.optimizer]}")
    if strategy.freeze:
        needs.append(f"freezes {', '.join(strategy.freeze)}")
    if strategy.lora is not None:
        needs.append(f"trains LoRA adapters of rank {strategy.lora.rank}")
    if needs:
        _say(f"warning: this plan fits only if the script itself {', '.join(needs)}")


def _check_rules(plan: Plan, *, script: str | None, arguments: tuple[str, ...]) -> None:
    targets = Targets(
        files=(script_file(script),) if script else (),
        arguments=arguments,
        checkpoint=probe_resumed(arguments),
        schemas=load_schemas(),
    )
    situation = situation_of_launch(plan, machine=plan.machine, targets=targets)
    stop_at_errors(situation, no_check=not plan.is_checked)


def _check_micro_batch(request: Request) -> None:
    planned = request.plan.strategy.micro_batch_size if request.plan else None
    if request.global_batch_size is not None and not (request.micro_batch_size or planned):
        raise UserError(
            "global-batch-needs-micro-batch",
            "the global batch needs the script's micro-batch",
            found=f"--global-batch-size {request.global_batch_size} without --micro-batch-size",
            why="the script sets its own micro-batch; only accumulation is left to make the global batch",
            fix="give --micro-batch-size, with the batch size that the script uses on each rank",
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


def _print_dry_run(to_launch: Launch, folder: Any) -> None:
    _say(*_lines(to_launch))
    for path, text in launch_files(to_launch, folder).items():
        click.echo(f"# {path}\n{text}")
    click.echo(launch_command(to_launch, folder))


def _lines(to_launch: Launch) -> tuple[str, ...]:
    lines = (*plan_lines(to_launch.plan), *unapplied(to_launch.plan))
    if not is_on_one_of_many_gpus(to_launch.plan):
        return lines
    gpu_ids = to_launch.rendezvous.gpu_ids
    return (
        *lines,
        f"one rank uses GPU {gpu_ids} alone: with more in sight Trainer would spread over them all",
    )


def _say(*lines: str) -> None:
    for line in lines:
        click.echo(f"zerofit: {line}", err=True)
