"""Synchronizes random states over the stages of a pipeline: for the order of samples, and generation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from zerofit.training.pipeline.groups import Groups


def synchronize_sampler(loader: DataLoader[Any], *, has_seed: bool) -> int:
    """Make a DataLoader's sampler draw the same order on all ranks; all ranks call it.

    A sampler without a generator draws from the process's random state, which differs if a script seeds each
    rank by itself, and after the first dropout, as stages have different blocks.

    Args:
        loader: not yet prepared.
        has_seed: True if accelerate shuffles by its own seed (use_seedable_sampler).

    Returns:
        The first rank's seed, for such a seedable sampler.
    """
    from accelerate.data_loader import get_sampler
    from accelerate.utils import broadcast_object_list

    sampler = get_sampler(loader)
    generator = getattr(sampler, "generator", None)
    if hasattr(sampler, "generator") and generator is None and not has_seed:
        sampler.generator = generator = torch.Generator()
        # As accelerate does for several ranks (1.15, data_loader.py, prepare_data_loader).
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
    first: list[Any] = [torch.initial_seed(), generator.get_state() if generator is not None else None]
    broadcast_object_list(first)
    if generator is not None and first[1] is not None:
        generator.set_state(first[1])
    return int(first[0])


def synchronize_random_state(groups: Groups) -> None:
    """Set the CPU's and the GPU's random state of all stages to the first stage's."""
    has_gpu = torch.cuda.is_available()
    state = [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if has_gpu else [])
    for device_state in state:
        dist.broadcast(device_state, groups.first_rank, group=groups.host)
    torch.set_rng_state(state[0])
    if has_gpu:
        torch.cuda.set_rng_state(state[1])
