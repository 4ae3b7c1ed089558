"""A process group of ranks that are not there, by private names of torch.distributed (2.8 to 2.13)."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_FORMER_GROUPS: list[Any] = []
"""Fake groups of this process. They are kept: what is left of a sharded model refers to its group until it is
collected, and freed groups then corrupted the heap (torch 2.13)."""


@contextmanager
def fake_ranks(copies: int, shard_size: int) -> Iterator[Any]:
    """Make this process rank 0 of a process group whose collectives do nothing, and return its mesh.

    A group of this process alone, which a captured script makes, is set aside meanwhile.

    Raises:
        RuntimeError: the process is in a process group with others.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError("this process is in a process group, beside which it can't be rank 0 of another")
    if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::_allgather_base_", "Meta"):
        # Collectives of fake tensors, which newer releases have by themselves.
        import torch.distributed._tools.fake_collectives
    with _without_groups(dist.distributed_c10d):
        dist.init_process_group("fake", rank=0, world_size=copies * shard_size, store=FakeStore())
        try:
            sizes = (copies, shard_size) if copies > 1 else (shard_size,)
            names = ("dp_replicate", "dp_shard") if copies > 1 else ("dp_shard",)
            yield init_device_mesh("cpu", sizes, mesh_dim_names=names)
        finally:
            _FORMER_GROUPS.extend(dist.distributed_c10d._world.pg_map)
            dist.destroy_process_group()


_GROUPS = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg")
"""torch's dictionaries of process groups (torch/distributed/distributed_c10d.py, _World; 2.8 and 2.13)."""


@contextmanager
def _without_groups(c10d: Any) -> Iterator[None]:
    """Set the process groups of this process aside, and join them again afterwards.

    What follows may destroy all groups that it has made.
    """
    from torch._C._distributed_c10d import _register_process_group

    world, kept = c10d._world, {name: dict(getattr(c10d._world, name)) for name in _GROUPS}
    default, count = world.default_pg, world.group_count
    for name in _GROUPS:
        getattr(world, name).clear()
    c10d._update_default_pg(None)
    try:
        yield
    finally:
        for name, groups in kept.items():
            getattr(world, name).update(groups)
        for group, name in kept["pg_names"].items():
            _register_process_group(name, group)
        c10d._update_default_pg(default)
        world.group_count = count
