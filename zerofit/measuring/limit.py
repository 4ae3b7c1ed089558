"""A limit on the memory that a rung may take, so that it fails as on a smaller machine."""

from __future__ import annotations

import resource
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

from zerofit.measuring.memory import process_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

_UNLIMITED = 1.0


@contextmanager
def limited_memory(limit_bytes: int | None, device: str, *, has_deepspeed: bool = False) -> Iterator[None]:
    """Let no more memory be taken for a while; it is there again for whoever tells how that ended.

    On a GPU torch's allocator keeps to it. On the CPU the kernel does, by what the process may map beyond
    what it has: getrlimit(2), RLIMIT_DATA, which counts what VmData does, private writable mappings.

    Args:
        limit_bytes: None for all there is.
        device: "cpu" or "cuda".
        has_deepspeed: whether DeepSpeed trains, which on a GPU is then told of the limit.
    """
    if limit_bytes is None:
        yield
    elif device == "cpu":
        with _limited_process(limit_bytes):
            yield
    else:
        with _limited_gpu(limit_bytes), told_to_deepspeed(limit_bytes) if has_deepspeed else nullcontext():
            yield


@contextmanager
def _limited_gpu(limit_bytes: int) -> Iterator[None]:
    import torch

    whole_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(gpu_fraction(limit_bytes, whole_bytes))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(_UNLIMITED)


def gpu_fraction(limit_bytes: int, whole_bytes: int) -> float:
    """Return which part of a GPU's memory a limit is, at most all of it."""
    return min(_UNLIMITED, limit_bytes / whole_bytes)


@contextmanager
def told_to_deepspeed(limit_bytes: int, accelerator: Any = None) -> Iterator[None]:
    """Let DeepSpeed find no more memory free for a while than a limit leaves.

    By what is free its stages 1 and 2 choose where they lay the parameters one behind the other, on the GPU
    or on the host (deepspeed/runtime/zero/stage_1_and_2.py, flatten_on_accelerator); they ask the driver,
    which does not know torch's limit.

    Args:
        limit_bytes: what torch may reserve.
        accelerator: DeepSpeed's, or one like it; None asks DeepSpeed.
    """
    asked = accelerator or import_module("deepspeed.accelerator").get_accelerator()
    whole = asked.available_memory

    def available_memory(device_index: int | None = None) -> int:
        left = limit_bytes - int(asked.memory_reserved(device_index))
        return max(0, min(left, int(whole(device_index))))

    asked.available_memory = available_memory
    try:
        yield
    finally:
        del asked.available_memory  # of the object: its class still has the method


@contextmanager
def _limited_process(limit_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = process_bytes("VmData") + limit_bytes
    least = min(one for one in (wanted, soft) if one != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_DATA, (least, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
