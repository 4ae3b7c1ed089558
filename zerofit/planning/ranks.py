"""Check that a request's ranks, nodes and batch sizes go together."""

from __future__ import annotations

from zerofit.core.errors import UserError


def check_ranks(world_size: int, *, num_nodes: int, num_gpus: int | None, said: str) -> None:
    """Check that ranks divide over the nodes, and that each finds a GPU.

    Args:
        world_size: ranks of all nodes together.
        num_nodes: machines that take part.
        num_gpus: of one node; None where ranks need none.
        said: what tells the number of ranks, for messages.

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
    if num_gpus is not None and world_size // num_nodes > num_gpus:
        raise UserError(
            "more-ranks-than-gpus",
            "there are fewer GPUs than ranks",
            found=f"{said} on {num_nodes} x {num_gpus} GPUs",
            why="each rank needs a GPU of its own",
            fix=f"set --num-processes to at most {num_nodes * num_gpus}, or rehearse with --cpu",
        )
