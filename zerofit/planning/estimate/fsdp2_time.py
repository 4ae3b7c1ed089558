"""The time that FSDP2's collectives add to a step, by their sizes in its trace, or in one without it."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from zerofit.core.allocation_log import CostKind, Pass
from zerofit.planning.estimate.speeds import exposed_s

if TYPE_CHECKING:
    from zerofit.core.allocation_log import AllocationLog
    from zerofit.planning.estimate.engines.engine import Setup
    from zerofit.planning.estimate.speeds import Speeds

FSDP2_EXCHANGE = (
    "micro-batches x (first unit's all-gather + max(0, all-gathers - forward) + max(0, all-gathers - "
    "backward)) + what reduce-scatters and all-reduces of copies add to the last one + the last unit's "
    "reduce-scatter + 0.1 x what is hidden; sizes of each unit as traced",
    "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py: own streams, one prefetch",
)
"""Formula and source."""
_GATHER, _SCATTER, _REDUCE = "allgather", "reduce_scatter", "allreduce"
"""Parts of the names of c10d's operators."""


def fsdp2_exchange_s(setup: Setup, speeds: Speeds, *, forward_s: float, backward_s: float) -> float:
    """Return the seconds that FSDP2's collectives add: each runs beside the computation of another unit.

    The first unit's all-gather and the last unit's reduce-scatter have nothing beside them.

    Args:
        forward_s: computation of one micro-batch's forward pass.
        backward_s: of its backward pass, with recomputation.
    """
    forward = _collectives_s(setup, speeds, _GATHER, is_forward=True)
    backward = sum(_collectives_s(setup, speeds, _GATHER, is_forward=False))
    scatters = _collectives_s(setup, speeds, _SCATTER, is_forward=False)
    reduced = sum(scatters) + sum(_collectives_s(setup, speeds, _REDUCE, is_forward=False))
    first, times = max(forward, default=0.0), setup.num_micro_batches
    of_all = times * (first + exposed_s(sum(forward), forward_s)) + (times - 1) * exposed_s(
        backward, backward_s
    )
    return of_all + exposed_s(backward + reduced, backward_s) + reduced / max(1, len(scatters))


def _collectives_s(setup: Setup, speeds: Speeds, name: str, *, is_forward: bool) -> list[float]:
    """Return the seconds of each collective of a kind in one micro-batch, the last of a step."""
    link = speeds.copies if name == _REDUCE else speeds.shards
    if link is None:
        return []
    shards, copies = setup.topology.dp_shard_size, setup.topology.dp_replicate_size
    if not setup.log.shards:
        return [
            speeds.message_s + sent / link.bytes_per_s
            for sent in _sent_untraced(setup, name, is_forward=is_forward)
        ]
    sent = {_GATHER: shards - 1, _SCATTER: (shards - 1) / shards, _REDUCE: 2 * (copies - 1) / copies}[name]
    found: list[float] = []
    for cost in setup.log.costs:
        is_here = (cost.during is Pass.FORWARD) is is_forward
        if cost.kind is CostKind.COLLECTIVE and name in cost.operator and is_here:
            found += [speeds.message_s + sent * cost.fixed_bytes / link.bytes_per_s] * cost.count
    return found


_BLOCK = re.compile(r"^(?:.*?\.)?\d+\.")
"""The part of a parameter's name that all parameters of a block share."""


def _sent_untraced(setup: Setup, name: str, *, is_forward: bool) -> list[float]:
    """Return the bytes that each collective of a kind sends, by a log that was traced without FSDP2.

    It decides only which strategies are worth a trace of their own. Each block is a unit, and all the rest
    another, which stays gathered (accelerate/utils/fsdp_utils.py, fsdp2_prepare_model).
    """
    shards, copies = setup.topology.dp_shard_size, setup.topology.dp_replicate_size
    blocks, rest = unit_bytes(setup.log)
    if name == _GATHER:
        keeps = not setup.strategy.reshard_after_forward
        gathered = [*blocks, rest] if is_forward else [] if keeps else [*blocks]
        return [(shards - 1) / shards * whole for whole in gathered]
    if is_forward:
        return []
    if name == _REDUCE and copies == 1:
        return []
    share = (shards - 1) / shards if name == _SCATTER else 2 * (copies - 1) / copies / shards
    return [share * whole for whole in trained_unit_bytes(setup.log)]


@lru_cache(maxsize=16)
def unit_bytes(log: AllocationLog) -> tuple[tuple[int, ...], int]:
    """Return the bytes of the whole weights of each block, and those of all the rest."""
    return _by_block(log, only_trained=False)


@lru_cache(maxsize=16)
def trained_unit_bytes(log: AllocationLog) -> tuple[int, ...]:
    """Return the bytes of the gradients of each block, and of all the rest."""
    blocks, rest = _by_block(log, only_trained=True)
    return tuple(size for size in (*blocks, rest) if size)


def _by_block(log: AllocationLog, *, only_trained: bool) -> tuple[tuple[int, ...], int]:
    sizes: dict[str, int] = {}
    for parameter in log.parameters:
        if parameter.trains or not only_trained:
            found = _BLOCK.match(parameter.name)
            name = found[0] if found else ""
            sizes[name] = sizes.get(name, 0) + parameter.num_elements * parameter.bytes_per_element
    rest = sizes.pop("", 0)
    return tuple(sizes.values()), rest
