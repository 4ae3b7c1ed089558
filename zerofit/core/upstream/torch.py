"""Differences between releases of torch, from 2.8 on."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta


def set_device_guard() -> None:
    """Replace CUDA's device guard by one that does nothing, as FakeTensorMode does without a GPU.

    Seen on CUDA builds without a GPU, for unknown reasons: 2.11 crashes in _ensureCUDADeviceGuardSet if
    the first to call it is a capture's thread rather than its main thread; 2.8 crashes if both call it.
    CUDA builds of other releases were not tried.
    """
    import torch

    if torch.__version__.startswith("2.11.") and not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet()


def is_compiled(model: Any) -> bool:
    """Return True if torch.compile has compiled a module or a part of it, as wrapper or in place."""
    modules = model.modules()
    return any("_orig_mod" in one._modules or one._compiled_call_impl is not None for one in modules)


def is_in_backward() -> bool:
    """Return True inside a backward pass, including recomputation of a checkpointed block (torch 2.13)."""
    import torch

    return bool(torch._C._current_graph_task_id() != -1)


def sparse_parts(tensor: Any) -> tuple[Any, Any]:
    """Return the indices and values of a sparse tensor, coalesced or not."""
    return tensor._indices(), tensor._values()


def timeout_of_default_group() -> timedelta:
    """Return the timeout of the default process group (torch 2.8 to 2.13)."""
    import torch
    from torch.distributed import distributed_c10d as c10d

    kind = "cuda" if "nccl" in c10d.get_backend() else "cpu"
    timeout: timedelta = c10d._get_default_group()._get_backend(torch.device(kind)).options._timeout
    return timeout


@contextlib.contextmanager
def loading_to_host() -> Iterator[None]:
    """Make torch.load() load to host memory, whatever device its caller names."""
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
