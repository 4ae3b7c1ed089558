"""Rules on the number of ranks: over nodes, GPUs, and groups that share samples."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from zerofit.checking.rule import ACCELERATE, Hit, Rule, Severity, declared, fails

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerofit.checking.situation import RankCounts, Situation


@Rule(
    id="more-ranks-than-gpus",
    severity=Severity.ERROR,
    summary="there are fewer GPUs than ranks",
    why="each rank needs a GPU of its own",
    fix="start at most one rank for each GPU",
    see=f"{ACCELERATE}/state.py",
    evidence=fails(not_reproduced="needs a GPU"),
)
def _more_than_gpus(situation: Situation) -> Iterator[Hit]:
    ranks = situation.ranks
    if ranks is None:
        yield from _more_than_gpus_here(situation)
        return
    most = ranks.num_nodes * (ranks.gpus_per_node or 0)
    if ranks.gpus_per_node is None or ranks.world_size <= most:
        return
    fix = f"set --num-processes to at most {most}"
    yield Hit(
        found=f"{ranks.text} on {ranks.num_nodes} x {ranks.gpus_per_node} GPU{'' if most == 1 else 's'}",
        fix=f"{fix}, or rehearse with --cpu" if ranks.can_rehearse else f"name more GPUs in --gpus, or {fix}",
    )


def _more_than_gpus_here(situation: Situation) -> Iterator[Hit]:
    """Find it in a launch of files and flags on a known node."""
    topology, machine = situation.topology, situation.machine
    if topology is None or machine is None or situation.strategy is not None:
        return
    if machine.gpus and not topology.on_cpu and topology.ranks_per_node > len(machine.gpus):
        on_node = f"{topology.ranks_per_node} ranks on a node with {len(machine.gpus)} GPU"
        yield Hit(found=f"{on_node}{'s' * (len(machine.gpus) > 1)}")


def uneven_nodes(situation: Situation) -> Iterator[Hit]:
    """Yield a hit for ranks that do not divide over zerofit's --num-machines."""
    ranks = situation.ranks
    if ranks is not None and ranks.world_size % ranks.num_nodes:
        yield Hit(
            found=f"{ranks.text} with --num-machines {ranks.num_nodes}",
            why="--num-processes counts the ranks of all nodes together, and each node gets as many",
            fix=f"set --num-processes to a multiple of {ranks.num_nodes}",
        )


def uneven_groups(kind: str) -> Callable[[Situation], Iterator[Hit]]:
    """Return a predicate that finds ranks that make no whole groups of a kind of parallelism.

    Args:
        kind: "tensor", "sequence" or "pipeline"; of several kinds the last is named.
    """

    def find(situation: Situation) -> Iterator[Hit]:
        ranks = situation.ranks
        if ranks is None or ranks.world_size % math.prod(ranks.group_sizes.values()) == 0:
            return
        flags = {
            name: f"--{name}-parallel-size {size}" for name, size in ranks.group_sizes.items() if size > 1
        }
        if kind == list(flags)[-1]:
            share = "shares its samples" if kind == "sequence" else "holds one copy of the model"
            yield Hit(
                found=f"{ranks.text} with {' and '.join(flags.values())}",
                why=f"each group {share}, and every rank is in one",
                fix=_whole_groups(ranks, kind),
            )

    return find


def _whole_groups(ranks: RankCounts, kind: str) -> str:
    """Return numbers of ranks, and sizes of groups, that divide."""
    group_size = math.prod(ranks.group_sizes.values())
    below = ranks.world_size // group_size * group_size
    counts = [str(number) for number in (below, below + group_size) if number]
    fixes = [f"set --num-processes to {' or '.join(counts)}"]
    if sizes := [str(size) for size in range(2, ranks.world_size + 1) if ranks.world_size % size == 0]:
        fixes.append(f"--{kind}-parallel-size to {' or '.join(sizes)}")
    return ", or ".join(fixes)


RULES = declared(globals())
