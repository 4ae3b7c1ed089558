"""Rules on zerofit's own settings for FSDP2: what it shards, offloads and copies."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from zerofit.checking.rule import ACCELERATE, REFUSED, Hit, Rule, Severity, declared
from zerofit.checking.situation import known, text_of
from zerofit.core.overrides import OF_FSDP2, flag_of
from zerofit.core.plan import GROUP_FLAGS, Topology
from zerofit.core.strategy import Engine, OffloadDevice, Strategy, ZeroStage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerofit.checking.situation import RankCounts, Situation

_DOCS = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"
_OFFLOAD = f"{_DOCS}#torch.distributed.fsdp.CPUOffloadPolicy"
_SHARES_SAMPLES = ("tensor_parallel_size", "sequence_parallel_size", "pipeline_parallel_size")


def _under_fsdp2(
    find: Callable[[Situation, Strategy], Iterator[Hit]],
) -> Callable[[Situation], Iterator[Hit]]:
    """Return a predicate on zerofit's own strategies of FSDP2."""

    def of_situation(situation: Situation) -> Iterator[Hit]:
        strategy = situation.strategy
        if strategy is not None and strategy.engine is Engine.FSDP2:
            yield from find(situation, strategy)

    return of_situation


@Rule(
    id="zero-stage-under-fsdp2",
    severity=Severity.ERROR,
    summary="ZeRO stages are DeepSpeed's, FSDP2 has none",
    why="FSDP2 always shards parameters, gradients and optimizer states: as ZeRO-3 if it "
    "reshards after the forward pass (its default), as ZeRO-2 if not",
    fix="leave out {zero_stage}, or {engine} fsdp2",
    see=_DOCS,
    evidence=REFUSED,
)
@_under_fsdp2
def _with_stage(situation: Situation, strategy: Strategy) -> Iterator[Hit]:
    if strategy.zero_stage is not ZeroStage.NOTHING:
        yield Hit(found=f"{text_of(situation, 'engine')} with {text_of(situation, 'zero_stage')}")


@Rule(
    id="fsdp2-offloads-to-cpu",
    severity=Severity.ERROR,
    summary="FSDP2 offloads to the CPU only",
    why="its CPUOffloadPolicy stores shards in host memory; only DeepSpeed's ZeRO-3 offloads to NVMe",
    fix="set {param_offload} to cpu, or use ZeRO-3 for NVMe",
    see=_OFFLOAD,
    evidence=REFUSED,
)
@_under_fsdp2
def _to_nvme(situation: Situation, strategy: Strategy) -> Iterator[Hit]:
    if strategy.uses_nvme:
        name = "param_offload" if strategy.param_offload is OffloadDevice.NVME else "optimizer_offload"
        yield Hit(found=f"{text_of(situation, name)} with {text_of(situation, 'engine')}")


@Rule(
    id="fsdp2-offloads-all-states",
    severity=Severity.ERROR,
    summary="FSDP2 offloads parameters and optimizer states together",
    why="its CPUOffloadPolicy moves the shards that the optimizer steps, and with them gradients and states",
    fix="set {optimizer_offload} and {param_offload} to the same, or leave one of them out",
    see=_OFFLOAD,
    evidence=REFUSED,
)
@_under_fsdp2
def _in_part(situation: Situation, strategy: Strategy) -> Iterator[Hit]:
    names = ("optimizer_offload", "param_offload")
    if not strategy.uses_nvme and strategy.optimizer_offload is not strategy.param_offload:
        both = " with ".join(text_of(situation, name) for name in names)
        yield Hit(found=f"{both}, under {text_of(situation, 'engine')}")


@Rule(
    id="fsdp2-settings-of-another-engine",
    severity=Severity.ERROR,
    summary="a setting of FSDP2 has no effect under another engine",
    why="resharding, state dict types and hybrid sharding belong to FSDP2",
    fix="set {engine} to fsdp2, or leave it out",
    see=f"{ACCELERATE}/utils/dataclasses.py",
    evidence=REFUSED,
)
def _of_another_engine(situation: Situation) -> Iterator[Hit]:
    strategy = situation.strategy
    if strategy is None or strategy.engine is Engine.FSDP2:
        return
    topology, plain = situation.topology or Topology(), Strategy()
    for name in OF_FSDP2:
        if name in GROUP_FLAGS:
            value, default = getattr(topology, name), getattr(Topology(), name)
        else:
            value, default = getattr(strategy, name), getattr(plain, name)
        if value != default:
            words = flag_of(name, value) if isinstance(value, bool) else f"{flag_of(name)} {value}"
            engine = known(situation.settings.engine, "the engine")
            yield Hit(found=f"{words} with {engine.text}")


@Rule(
    id="fsdp2-without-other-groups",
    severity=Severity.ERROR,
    summary="zerofit runs FSDP2 with data parallelism only",
    why="its groups of ranks that share samples are DeepSpeed's, or those of a PyTorch pipeline",
    fix="leave out the groups, or {engine} fsdp2",
    see=f"{ACCELERATE}/parallelism_config.py",
    evidence=REFUSED,
)
@_under_fsdp2
def _with_groups(situation: Situation, _: Strategy) -> Iterator[Hit]:
    topology = situation.topology or Topology()
    sizes = {flag_of(name): getattr(topology, name) for name in _SHARES_SAMPLES}
    flags = [f"{flag} {size}" for flag, size in sizes.items() if size > 1]
    if flags:
        yield Hit(found=f"{text_of(situation, 'engine')} with {' and '.join(flags)}")


@Rule(
    id="hybrid-shards-not-whole",
    severity=Severity.ERROR,
    summary="the ranks don't divide into the copies of hybrid sharding",
    why="every copy of the weights is sharded over the same number of ranks",
    fix="set --num-processes to a multiple of --dp-replicate-size",
    see=f"{ACCELERATE}/parallelism_config.py",
    evidence=REFUSED,
)
def _uneven_copies(situation: Situation) -> Iterator[Hit]:
    ranks = situation.ranks
    if ranks is None or ranks.dp_replicate_size == 1:
        return
    groups = math.prod(size for kind, size in ranks.group_sizes.items() if kind != "sequence")
    if ranks.world_size % groups == 0 and (ranks.world_size // groups) % ranks.dp_replicate_size:
        yield Hit(found=f"{ranks.text} with --dp-replicate-size {ranks.dp_replicate_size}")


@Rule(
    id="hybrid-shards-of-one-rank",
    severity=Severity.ERROR,
    summary="hybrid sharding with a copy for each rank shards nothing",
    why="accelerate refuses FSDP2 without ranks to shard over; DDP keeps a copy on each rank",
    fix="set --dp-replicate-size to the number of nodes, or leave out --dp-replicate-size and {engine} fsdp2",
    see=f"{ACCELERATE}/parallelism_config.py",
    evidence=REFUSED,
)
def _no_shards(situation: Situation) -> Iterator[Hit]:
    ranks = situation.ranks
    if ranks is not None and 1 < ranks.dp_replicate_size == _replicas(ranks):
        yield Hit(found=f"{ranks.text} with --dp-replicate-size {ranks.dp_replicate_size}")


def _replicas(ranks: RankCounts) -> int:
    """Return the ranks that train the same weights."""
    return ranks.world_size // math.prod(
        size for kind, size in ranks.group_sizes.items() if kind != "sequence"
    )


RULES = declared(globals())
