"""layouts: every way to lay a model out over the ranks that the flags leave open, the simplest first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.core.plan import Topology
from zerofit.core.strategy import Engine, OffloadDevice, Strategy, ZeroStage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.core.facts import Machine
    from zerofit.core.strategy import Precision
    from zerofit.planning.inference.request import InferenceRequest, InferenceWorkload


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where a model lies."""

    strategy: Strategy
    topology: Topology


_KINDS = (
    (ZeroStage.NOTHING, OffloadDevice.NONE),
    (ZeroStage.PARAMETERS, OffloadDevice.NONE),
    (ZeroStage.PARAMETERS, OffloadDevice.CPU),
    (ZeroStage.PARAMETERS, OffloadDevice.NVME),
)
"""In the order of time that a pass takes: nothing is sent, weights are gathered, they come from host memory,
from the disk. A larger batch, for which a later one has room, may turn that over."""


def layouts(
    machine: Machine, workload: InferenceWorkload, request: InferenceRequest, precision: Precision
) -> tuple[Layout, ...]:
    """Return what is to be considered, in the order of preference; never empty.

    Args:
        machine: one node.
        workload: one rank has one prompt at least, where each holds the whole model.
        request: leaves out what contradicts its flags.
        precision: format of the weights.
    """
    on_cpu = request.on_cpu or not machine.gpus
    found = []
    for stage, offload in _kinds(request, on_cpu=on_cpu):
        is_partitioned = stage is ZeroStage.PARAMETERS
        topology = _topology(machine, workload, request, on_cpu=on_cpu, is_partitioned=is_partitioned)
        is_alone = is_partitioned and offload is OffloadDevice.NONE and topology.world_size == 1
        if is_alone and request.zero_stage is not ZeroStage.PARAMETERS:
            continue  # a single rank's part is the whole model
        strategy = Strategy(
            engine=Engine.DEEPSPEED if is_partitioned else Engine.NATIVE,
            zero_stage=stage,
            param_offload=offload,
            nvme_path=request.nvme_path if offload is OffloadDevice.NVME else None,
            precision=precision,
        )
        found.append(Layout(strategy=strategy, topology=topology))
    return tuple(found)


def _kinds(request: InferenceRequest, *, on_cpu: bool) -> Iterator[tuple[ZeroStage, OffloadDevice]]:
    for stage, offload in _KINDS:
        is_said = request.param_offload is offload
        if request.zero_stage not in (None, stage) or not (request.param_offload is None or is_said):
            continue
        if on_cpu and offload is not OffloadDevice.NONE and not is_said and request.nvme_path is None:
            continue  # the weights are in host memory as it is, mapped from the disk where nothing casts them
        yield stage, offload


def _topology(
    machine: Machine,
    workload: InferenceWorkload,
    request: InferenceRequest,
    *,
    on_cpu: bool,
    is_partitioned: bool,
) -> Topology:
    """Return the ranks: those said, else all GPUs, of which whole models use no more than have a prompt."""
    num_nodes = request.num_nodes or 1
    per_node = 1 if on_cpu else len(machine.gpus)
    if not is_partitioned:
        per_node = max(1, min(per_node, -(-workload.num_prompts // num_nodes)))
    world_size = request.num_processes or num_nodes * per_node
    return Topology(num_nodes=num_nodes, world_size=world_size, on_cpu=on_cpu)
