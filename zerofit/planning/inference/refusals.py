"""check_request: flags that contradict each other, the machine, or what inference is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.core.errors import UserError
from zerofit.core.strategy import OffloadDevice, ZeroStage
from zerofit.generation.generation_job import Gather
from zerofit.planning.ranks import check_ranks

if TYPE_CHECKING:
    from zerofit.core.facts import Machine
    from zerofit.planning.inference.request import InferenceRequest


def check_request(machine: Machine, request: InferenceRequest) -> None:
    """Check that something can be planned for.

    Raises:
        UserError: the ranks can't be made, a stage brings nothing, or two flags contradict each other.
    """
    _check_stage(request)
    _check_offload(request)
    _check_ranks(machine, request)


def _check_stage(request: InferenceRequest) -> None:
    stage = request.zero_stage
    if stage in (ZeroStage.OPTIMIZER_STATES, ZeroStage.GRADIENTS):
        raise UserError(
            "generate-stage-pointless",
            f"ZeRO stage {stage.value} partitions nothing that generation has",
            found=f"--zero-stage {stage.value}",
            why="stages 1 and 2 partition optimizer states and gradients; each rank would hold the whole"
            " model, as with stage 0",
            fix="give --zero-stage 0 for the whole model on each rank, 3 for a part of it, or leave it out",
            see="https://www.deepspeed.ai/tutorials/zero/#zero-overview",
        )


def _check_offload(request: InferenceRequest) -> None:
    offload = request.param_offload
    is_offloaded = offload not in (None, OffloadDevice.NONE)
    if request.zero_stage is ZeroStage.NOTHING and is_offloaded:
        raise UserError(
            "generate-offload-needs-zero3",
            "parameter offload needs ZeRO-3",
            found=f"--param-offload {offload} with --zero-stage 0",
            why="only stage 3 partitions parameters, so that stage 0 has no part to move",
            fix="leave out --zero-stage, or --param-offload",
        )
    if offload is OffloadDevice.NVME and request.nvme_path is None:
        raise UserError(
            "generate-nvme-path-missing",
            "offload to NVMe needs a folder on the disk",
            found="--param-offload nvme without --nvme-path",
            why="zerofit does not choose a disk that it then fills",
            fix="add --nvme-path with a folder on a local NVMe disk",
        )
    if request.nvme_path is not None and offload in (OffloadDevice.NONE, OffloadDevice.CPU):
        raise UserError(
            "generate-nvme-path-unused",
            "a folder on NVMe is named, and nothing may go there",
            found=f"--nvme-path {request.nvme_path} with --param-offload {offload}",
            why="it is used by --param-offload nvme alone",
            fix="leave one of the two out",
        )
    if request.zero_stage is ZeroStage.NOTHING and request.gather is Gather.ALWAYS:
        raise UserError(
            "generate-gather-needs-zero3",
            "there are no weights to gather",
            found="--gather always with --zero-stage 0",
            why="each rank holds the whole model already",
            fix="leave out --gather",
        )


def _check_ranks(machine: Machine, request: InferenceRequest) -> None:
    ranks, on_cpu = request.num_processes, request.on_cpu or not machine.gpus
    if ranks is not None:
        check_ranks(
            ranks,
            num_nodes=request.num_nodes or 1,
            num_gpus=None if on_cpu else len(machine.gpus),
            said=f"--num-processes {ranks}",
        )
