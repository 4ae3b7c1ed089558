"""Examples of the rules of zerofit/checking/rules/deepspeed/offload.py."""

from __future__ import annotations

from dataclasses import replace

from rule_examples.example import NVME, TWO_RANKS, Example, Examples, config
from zerofit.core.facts import Checkpoint
from zerofit.core.strategy import Engine, OffloadDevice, Strategy, ZeroStage

_CPU = {"device": "cpu"}
_ZERO3 = Strategy(engine=Engine.DEEPSPEED, zero_stage=ZeroStage.PARAMETERS)


def _zero(stage: int, **offload: dict[str, str]) -> Example:
    return Example(deepspeed=config(stage, **offload))


def _resumed(stage: int, *, num_ranks: int = 2, partitions_parameters: bool = False) -> Example:
    return Example(
        deepspeed=config(stage),
        topology=TWO_RANKS,
        checkpoint=Checkpoint(
            folder="checkpoint-2", num_ranks=num_ranks, partitions_parameters=partitions_parameters
        ),
    )


EXAMPLES = {
    "zero-needs-deepspeed": Examples(
        bad=Example(strategy=replace(_ZERO3, engine=Engine.NATIVE), topology=TWO_RANKS),
        good=Example(strategy=_ZERO3, topology=TWO_RANKS),
    ),
    "optimizer-offload-needs-zero": Examples(
        bad=_zero(0, offload_optimizer=_CPU),
        good=_zero(1, offload_optimizer=_CPU),
    ),
    "param-offload-needs-zero3": Examples(
        bad=_zero(2, offload_param=_CPU),
        good=_zero(3, offload_param=_CPU),
    ),
    "nvme-offload-needs-zero3": Examples(
        bad=_zero(2, offload_optimizer=NVME),
        good=_zero(3, offload_optimizer=NVME),
    ),
    "nvme-needs-path": Examples(
        bad=_zero(3, offload_optimizer={"device": "nvme"}),
        good=_zero(3, offload_optimizer=NVME),
    ),
    "nvme-path-unused": Examples(
        bad=Example(strategy=replace(_ZERO3, nvme_path="/local_nvme"), topology=TWO_RANKS),
        good=Example(
            strategy=replace(_ZERO3, nvme_path="/local_nvme", optimizer_offload=OffloadDevice.NVME),
            topology=TWO_RANKS,
        ),
    ),
    "resume-needs-same-ranks": Examples(
        bad=_resumed(2, num_ranks=4),
        good=_resumed(2),
    ),
    "resume-needs-same-layout": Examples(
        bad=_resumed(3),
        good=_resumed(3, partitions_parameters=True),
    ),
}
