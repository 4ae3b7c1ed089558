"""Examples of the rules of zerofit/checking/rules/fsdp/strategy.py."""

from __future__ import annotations

from typing import Any

from rule_examples.example import LANGUAGE, TWO_RANKS, Example, Examples
from zerofit.checking.situation import RankCounts
from zerofit.core.plan import Topology
from zerofit.core.strategy import Engine, OffloadDevice, Strategy, ZeroStage

_CPU, _NVME = OffloadDevice.CPU, OffloadDevice.NVME


def _fsdp2(topology: Topology = TWO_RANKS, **fields: Any) -> Example:
    strategy = Strategy(engine=Engine.FSDP2, **fields)
    return Example(strategy=strategy, topology=topology, script=LANGUAGE)


def _zero_3(**fields: Any) -> Example:
    strategy = Strategy(engine=Engine.DEEPSPEED, zero_stage=ZeroStage.PARAMETERS, **fields)
    return Example(strategy=strategy, topology=TWO_RANKS, script=LANGUAGE)


def _copies(number: int) -> Example:
    ranks = RankCounts(world_size=4, text="--num-processes 4", dp_replicate_size=number)
    return Example(ranks=ranks, script=LANGUAGE)


EXAMPLES = {
    "zero-stage-under-fsdp2": Examples(bad=_fsdp2(zero_stage=ZeroStage.PARAMETERS), good=_zero_3()),
    "fsdp2-offloads-to-cpu": Examples(
        bad=_fsdp2(optimizer_offload=_NVME, param_offload=_NVME, nvme_path="/tmp"),
        good=_zero_3(optimizer_offload=_CPU, param_offload=_CPU),
    ),
    "fsdp2-offloads-all-states": Examples(
        bad=_fsdp2(optimizer_offload=_CPU), good=_zero_3(optimizer_offload=_CPU)
    ),
    "fsdp2-settings-of-another-engine": Examples(bad=_zero_3(reshard_after_forward=False), good=_zero_3()),
    "fsdp2-without-other-groups": Examples(
        bad=_fsdp2(Topology(world_size=2, tensor_parallel_size=2)),
        good=Example(strategy=Strategy(), topology=TWO_RANKS, script=LANGUAGE),
    ),
    "hybrid-shards-not-whole": Examples(bad=_copies(3), good=_copies(2)),
    "hybrid-shards-of-one-rank": Examples(bad=_copies(4), good=_copies(2)),
}
