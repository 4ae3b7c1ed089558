"""Flags to problems: probes the model and the machine, and refuses what no plan can be made for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.candidates import divisors
from zerofit.cli.plan_options import Loop
from zerofit.errors import UserError
from zerofit.estimate.zero_arrival import makes_model_first
from zerofit.facts import Workload
from zerofit.plan import Topology
from zerofit.planning.problem import Problem
from zerofit.probe.machine import probe_machine
from zerofit.probe.machine_spec import SpecifiedMachine, machine_of_spec
from zerofit.probe.model import probe_model
from zerofit.probe.model_dimensions import check_sequence_length

if TYPE_CHECKING:
    from zerofit.cli.plan_options import MachineFlags, ModelFlags
    from zerofit.facts import Machine, ModelFacts, Versions
    from zerofit.probe.model_source import ModelSource
    from zerofit.request import Request
    from zerofit.script_facts import ScriptFacts


def source_of(flags: ModelFlags) -> ModelSource:
    """Return the model that the flags name.

    Raises:
        UserError: there is none, or it can't be planned with the lengths that the flags give.
    """
    if flags.model is None:
        raise UserError(
            "model-missing",
            "a plan needs a model",
            found="no --model",
            why="its dimensions decide what fits",
            fix="give --model with a folder, a config.json, a hub id or a name of the catalog",
        )
    source = probe_model(
        flags.model, task=flags.task, trust_remote_code=flags.trust_remote_code, is_fast=flags.is_fast
    )
    if source.facts.vocab_size and flags.sequence_length is None:
        raise _no_length(source.facts, flags.model)
    check_sequence_length(source.facts, flags.sequence_length, flags.target_length)
    return source


def workload_of(flags: ModelFlags, request: Request, facts: ModelFacts) -> Workload:
    """Return what one optimizer step has to process."""
    return Workload(
        global_batch_size=request.global_batch_size,
        sequence_length=flags.sequence_length if facts.vocab_size else None,
        target_length=flags.target_length if facts.num_decoder_layers else None,
        is_padded=flags.is_padded,
        keeps_outputs=flags.loop is not Loop.TRAINER,
    )


def machine_of(flags: MachineFlags, *, num_nodes: int, gpus: str | None = None) -> SpecifiedMachine:
    """Return the machine that the flags describe, or the one that is here.

    Args:
        flags: what was said of it.
        num_nodes: machines that take part.
        gpus: in place of --gpus.

    Raises:
        UserError: no GPU is here, or a flag can't be read.
    """
    spec = gpus or flags.gpus
    if spec is not None:
        return machine_of_spec(
            spec,
            num_nodes=num_nodes,
            host_ram=flags.host_ram,
            nvme=flags.nvme,
            cpu_cores=flags.cpu_cores,
            network=flags.network,
            host_bandwidth=flags.host_bandwidth,
        )
    said = [
        f"--{name.replace('_', '-')} {value}"
        for name in ("host_ram", "nvme", "cpu_cores", "network", "host_bandwidth")
        if (value := getattr(flags, name)) is not None
    ]
    if said:
        raise UserError(
            "gpus-missing",
            "a machine that is not here needs its GPUs",
            found=f"{' '.join(said)} without --gpus",
            why="without --gpus the plan is for the machine that is here, as it is",
            fix="add --gpus, such as --gpus 8xA100-80G, or leave the others out",
        )
    machine = probe_machine()
    if not machine.gpus:
        raise no_gpus_here()
    return SpecifiedMachine(machine=machine, assumptions=())


def no_gpus_here(fix: str = "say which GPUs the run will have, such as --gpus 8xA100-80G") -> UserError:
    """Return what is said where a plan has no GPU to be made for."""
    return UserError(
        "no-gpus-here",
        "there is no GPU on this machine to plan for",
        found="no GPU that the driver shows",
        why="a plan holds memory and rates of GPUs against the model",
        fix=fix,
    )


def problem_of(
    flags: ModelFlags,
    *,
    request: Request,
    source: ModelSource,
    machine: Machine,
    versions: Versions,
    topology: Topology,
    script: ScriptFacts | None = None,
) -> Problem:
    """Return the problem that the flags pose on one machine.

    Args:
        flags: what was said of model and workload.
        request: what was said of the strategy.
        source: the model.
        machine: one node.
        versions: of what will run.
        topology: the ranks.
        script: what will run; None where it is not known.

    Raises:
        UserError: the ranks do not divide the global batch.
    """
    workload = workload_of(flags, request, source.facts)
    _check_global_batch(workload.global_batch_size, topology)
    return Problem(
        model=source.facts,
        machine=machine,
        topology=topology,
        workload=workload,
        versions=versions,
        request=request,
        allow=flags.allow,
        lora_rank=flags.lora_rank,
        reserve=flags.reserve,
        makes_model_first=makes_model_first(script),
        expandable_segments=flags.expandable_segments,
    )


def _no_length(facts: ModelFacts, model: str) -> UserError:
    most = facts.max_sequence_length
    return UserError(
        "sequence-length-missing",
        "a plan needs the length of the samples",
        found=f"--model {model} without --seq-len",
        why="activations grow with it",
        fix=f"give --seq-len{f', at most {most}' if most else ''}",
    )


def _check_global_batch(size: int | None, topology: Topology) -> None:
    ranks = topology.data_parallel_size
    if size is None or size % ranks == 0:
        return
    below = size // ranks * ranks
    sizes = " or ".join(str(one) for one in (below, below + ranks) if one)
    fewer = max(one for one in divisors(size) if one <= ranks)
    raise UserError(
        "global-batch-not-divisible",
        "the global batch does not divide over the GPUs",
        found=f"--global-batch {size} on {ranks} GPUs",
        why="every rank takes the same whole number of samples, and zerofit never rounds a global batch",
        fix=f"set --global-batch to {sizes}, or use {fewer} GPU{'s' if fewer > 1 else ''}",
    )
