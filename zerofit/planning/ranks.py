"""Checks that ranks divide over the nodes, over GPUs and into groups."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from zerofit.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping


def check_ranks(
    world_size: int, *, num_nodes: int, num_gpus: int | None, said: str, can_rehearse: bool = True
) -> None:
    """Check that ranks divide over the nodes and that each has a GPU.

    Args:
        num_gpus: GPUs per node; None if the ranks need none.
        said: the flag or setting that gives the number of ranks, for messages.
        can_rehearse: False for another machine, given by --gpus.

    Raises:
        UserError: they do not.
    """
    if world_size % num_nodes:
        raise UserError(
            "ranks-not-divisible",
            "the ranks do not divide over the nodes",
            found=f"{said} with --num-machines {num_nodes}",
            why="--num-processes counts the ranks of all nodes together, and each node gets as many",
            fix=f"set --num-processes to a multiple of {num_nodes}",
        )
    most = num_nodes * (num_gpus or 0)
    if num_gpus is not None and world_size > most:
        raise UserError(
            "more-ranks-than-gpus",
            "there are fewer GPUs than ranks",
            found=f"{said} on {num_nodes} x {num_gpus} GPU{'' if most == 1 else 's'}",
            why="each rank needs a GPU of its own",
            fix=f"set --num-processes to at most {most}, or rehearse with --cpu"
            if can_rehearse
            else f"name more GPUs in --gpus, or set --num-processes to at most {most}",
        )


def check_groups(world_size: int, sizes: Mapping[str, int], *, said: str) -> None:
    """Check that ranks divide into tensor-, sequence- and pipeline-parallel groups.

    Args:
        world_size: ranks of all nodes together.
        sizes: ranks per group by the kind of parallelism: "tensor", "sequence", "pipeline".
        said: the flag or setting that gives the number of ranks, for the message.

    Raises:
        UserError: they do not.
    """
    group_size = math.prod(sizes.values())
    if world_size % group_size == 0:
        return
    flags = {kind: f"--{kind}-parallel-size {size}" for kind, size in sizes.items() if size > 1}
    kind = list(flags)[-1]
    below = world_size // group_size * group_size
    fits = [size for size in range(2, world_size + 1) if world_size % size == 0]
    fixes = [f"set --num-processes to {' or '.join(str(n) for n in (below, below + group_size) if n)}"]
    if fits:
        fixes.append(f"--{kind}-parallel-size to {' or '.join(map(str, fits))}")
    share = "shares its samples" if kind == "sequence" else "holds one copy of the model"
    raise UserError(
        f"{kind}-groups-not-whole",
        f"the ranks make no whole {kind}-parallel groups",
        found=f"{said} with {' and '.join(flags.values())}",
        why=f"each group {share}, and every rank is in one",
        fix=", or ".join(fixes),
    )
