"""Checkpoint: what the files of a DeepSpeed checkpoint show, without loading them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One folder that a run can resume from."""

    folder: str
    """As the user named it."""
    num_ranks: int
    """Ranks that saved optimizer states; 0 where there are none, as at ZeRO stage 0."""
    partitions_parameters: bool
    """Whether each rank saved its own shard of the parameters, as at ZeRO-3."""
    is_universal: bool = False
    """Whether ds_to_universal made it, so that it loads on any number of ranks."""
