"""The process groups of a pipeline rank: its pipeline, its replicas, and the ends with tied embeddings."""

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
    """The same ranks with the gloo backend, for tensors in host memory."""
    replicas: Any
    """The ranks with the same stages, one in each copy of the model: the data-parallel group."""
    ends: Any
    """The ranks of the first and the last stage, which both hold tied embeddings."""
    place: int
    """This rank's index in its pipeline; also its first stage."""
    num_ranks: int
    """Ranks per pipeline."""

    @property
    def first_rank(self) -> int:
        """The global rank of the first stage."""
        return int(dist.get_global_rank(self.pipeline, 0))

    @property
    def last_rank(self) -> int:
        """The global rank of the last stage."""
        return int(dist.get_global_rank(self.pipeline, self.num_ranks - 1))

    @property
    def ranks(self) -> range:
        """The global ranks of the pipeline."""
        return range(self.first_rank, self.last_rank + 1)

    @property
    def is_last(self) -> bool:
        """True if this rank holds the last stage, with the head."""
        return self.place == self.num_ranks - 1


def make_groups(num_ranks: int) -> Groups:
    """Create the process groups of pipelines of this many ranks; all ranks call it.

    They get the default group's timeout, which is Trainer's ddp_timeout.
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
    """Create process groups, and return this rank's; a placeholder if it is in none."""
    group, _ = dist.new_subgroups_by_enumeration(
        ranks_of_groups, timeout=timeout_of_default_group(), **backend
    )
    return group
