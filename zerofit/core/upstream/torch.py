"""Differences between releases of torch, from 2.8 on."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta


def set_device_guard() -> None:
    """Put a device guard that does nothing in place of CUDA's, as FakeTensorMode does where there is no GPU.

    Seen on CUDA builds without a GPU, for reasons not found: 2.11 crashes in _ensureCUDADeviceGuardSet where
    the first to call it is a capture's thread, and not its main thread; 2.8 ends where both call it.
    CUDA builds of other releases were not tried.
    """
    import torch

    if torch.__version__.startswith("2.11.") and not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet()


def is_compiled(model: Any) -> bool:
    """True if torch.compile has compiled a module, or a part of it: by a wrapper, or in its place."""
    modules = model.modules()
    return any("_orig_mod" in one._modules or one._compiled_call_impl is not None for one in modules)


def is_in_backward() -> bool:
    """Return True inside a backward pass, as in what a checkpointed block computes again (torch 2.13)."""
    import torch

    return bool(torch._C._current_graph_task_id() != -1)


def sparse_parts(tensor: Any) -> tuple[Any, Any]:
    """Return the places and values of a sparse tensor's elements, whether it is coalesced or not."""
    return tensor._indices(), tensor._values()


def timeout_of_default_group() -> timedelta:
    """Return how long operations of the default process group may take (torch 2.8 to 2.13)."""
    import torch
    from torch.distributed import distributed_c10d as c10d

    kind = "cuda" if "nccl" in c10d.get_backend() else "cpu"
    timeout: timedelta = c10d._get_default_group()._get_backend(torch.device(kind)).options._timeout
    return timeout


@contextlib.contextmanager
def loading_to_host() -> Iterator[None]:
    """Let torch.load() load to host memory, whatever device its caller names."""
    import torch

    original = torch.load

    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "map_location": "cpu"})

    torch.load = load
    try:
        yield
    finally:
        torch.load = original
