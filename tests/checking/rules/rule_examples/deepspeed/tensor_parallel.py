"""Examples of the rules of zerofit/checking/rules/deepspeed/tensor_parallel.py."""

from __future__ import annotations

from dataclasses import replace

from rule_examples.example import LANGUAGE, LOADED, TWO_RANKS, Example, Examples, at_zero, zero
from zerofit.core.facts import Checkpoint
from zerofit.core.plan import Topology
from zerofit.core.strategy import Engine, Lora, Strategy, ZeroStage

ZERO2 = Strategy(engine=Engine.DEEPSPEED, zero_stage=ZeroStage.GRADIENTS)
_GROUP = Topology(world_size=2, tensor_parallel_size=2)
_CUT = {"tensor_parallel": {"autotp_size": 2}}


def _resumed(size: int) -> Example:
    return Example(
        deepspeed=zero(2),
        topology=TWO_RANKS,
        checkpoint=Checkpoint(
            folder="checkpoint-2", num_ranks=2, partitions_parameters=False, tensor_parallel_size=size
        ),
    )


EXAMPLES = {
    "tensor-parallel-needs-deepspeed": Examples(
        bad=Example(strategy=Strategy(), topology=_GROUP),
        good=Example(strategy=ZERO2, topology=TWO_RANKS),
    ),
    "tensor-parallel-groups-not-whole": Examples(
        bad=Example(deepspeed=zero(2, tensor_parallel={"autotp_size": 4}), topology=TWO_RANKS),
        good=Example(deepspeed=zero(2), topology=TWO_RANKS),
    ),
    "tensor-parallel-without-gathered-saving": Examples(
        bad=Example(deepspeed=zero(2, **_CUT), script=LANGUAGE),
        good=at_zero(2, LANGUAGE),
    ),
    "tensor-parallel-at-zero3-needs-newer-deepspeed": Examples(
        bad=Example(
            deepspeed=zero(3, **_CUT),
            script=LANGUAGE,
            versions={"deepspeed": "0.19.3"},
        ),
        good=at_zero(3, LANGUAGE, versions={"deepspeed": "0.19.3"}),
    ),
    "tensor-parallel-loading-at-zero3": Examples(
        bad=Example(deepspeed=zero(3, **_CUT), script=LOADED),
        good=at_zero(3, LOADED),
    ),
    "tensor-parallel-with-adapters": Examples(
        bad=Example(strategy=replace(ZERO2, lora=Lora()), topology=_GROUP, script=LANGUAGE),
        good=Example(strategy=ZERO2, topology=TWO_RANKS, script=LANGUAGE),
    ),
    "resume-needs-same-tensor-parallel-size": Examples(
        bad=_resumed(2),
        good=_resumed(1),
    ),
    "tensor-parallel-over-nodes": Examples(
        bad=Example(strategy=ZERO2, topology=Topology(num_nodes=2, world_size=8, tensor_parallel_size=8)),
        good=Example(strategy=ZERO2, topology=Topology(num_nodes=2, world_size=8, tensor_parallel_size=4)),
    ),
}
