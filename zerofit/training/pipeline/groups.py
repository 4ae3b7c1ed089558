"""Process groups of a rank in a pipeline: its stages, its copies, the ends that share tied embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from zerofit.core.upstream.torch import timeout_of_default_group


@dataclass(frozen=True, slots=True)
class Groups:
    """The process groups of a rank. Ranks of one pipeline are consecutive."""

    pipeline: Any
    """The ranks of one copy of the model."""
    host: Any
    """The same ranks on gloo, for states that stay in host memory."""
    replicas: Any
    """The ranks that hold the same stages, one in each copy of the model."""
    ends: Any
    """The first and the last stage of one copy, which share tied embeddings."""
    place: int
    """This rank's place in its pipeline, from 0; also the first stage that it holds."""
    num_ranks: int
    """Ranks of one pipeline."""

    @property
    def first_rank(self) -> int:
        """The rank of the first stage of this copy of the model."""
        return int(dist.get_global_rank(self.pipeline, 0))

    @property
    def last_rank(self) -> int:
        """The rank of the last stage."""
        return int(dist.get_global_rank(self.pipeline, self.num_ranks - 1))

    @property
    def ranks(self) -> range:
        """The ranks of this copy of the model, by their first stage."""
        return range(self.first_rank, self.last_rank + 1)

    @property
    def is_last(self) -> bool:
        """True if this rank holds the head."""
        return self.place == self.num_ranks - 1


def make_groups(num_ranks: int) -> Groups:
    """Make the process groups of pipelines of so many ranks; all ranks call it.

    They have the default group's time-out, which is Trainer's ddp_timeout.
    """
    ranks = range(dist.get_world_size())
    firsts = ranks[::num_ranks]
    pipelines = [list(range(first, first + num_ranks)) for first in firsts]
    pipeline = _group_of_this_rank(pipelines)
    return Groups(
        pipeline=pipeline,
        host=pipeline if dist.get_backend() == "gloo" else _group_of_this_rank(pipelines, backend="gloo"),
        replicas=_group_of_this_rank([list(ranks[place::num_ranks]) for place in range(num_ranks)]),
        ends=_group_of_this_rank([[first, first + num_ranks - 1] for first in firsts]),
        place=dist.get_rank() % num_ranks,
        num_ranks=num_ranks,
    )


def _group_of_this_rank(ranks_of_groups: list[list[int]], **backend: str) -> Any:
    """Make groups of ranks, and return this rank's; a placeholder where it is in none."""
    group, _ = dist.new_subgroups_by_enumeration(
        ranks_of_groups, timeout=timeout_of_default_group(), **backend
    )
    return group
