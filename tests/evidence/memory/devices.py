"""Device and host memory on a machine without GPU: CPU storages are labelled, and moves between them copy.

The device is called "cpu:0" and the host "cpu". Torch keeps both in the same memory, but passes the name to
each factory function, and a move from one to the other becomes a copy, as with a GPU. DeepSpeed's accelerator
names the device "cpu:0".
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memory.track import Tracker

DEVICE, HOST = torch.device("cpu", 0), torch.device("cpu")


@contextlib.contextmanager
def two_memories(tracker: Tracker) -> Iterator[None]:
    """Make tensors report the memory they live in, and moves between the two copy."""
    plain_device, plain_to = torch.Tensor.device, torch.Tensor.to

    def device(tensor: torch.Tensor) -> torch.device:
        place: torch.device = plain_device.__get__(tensor)
        return DEVICE if place.type == "cpu" and tracker.is_on_device(tensor) else place

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        target = _target(args, kwargs)
        crosses = (
            target is not None and target.type == "cpu" and (target == DEVICE) != tracker.is_on_device(tensor)
        )
        if not crosses:
            if target == DEVICE:  # torch itself would copy "cpu" to "cpu:0"
                args, kwargs = _without_device(args, kwargs)
            return plain_to(tensor, *args, **kwargs) if args or kwargs else tensor
        with tracker.born_on(device=target == DEVICE):
            moved = plain_to(tensor, *args, **kwargs)
            return moved.clone() if moved.data_ptr() == tensor.data_ptr() else moved

    torch.Tensor.device = property(device)
    torch.Tensor.to = to
    torch.Tensor.cpu = lambda tensor, *_: to(tensor, HOST)
    try:
        with _accelerator(tracker):
            yield
    finally:
        for name in ("device", "to", "cpu"):
            delattr(torch.Tensor, name)


def _target(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """Return the device that a call of Tensor.to names."""
    for value in (*args[:1], *((kwargs["device"],) if kwargs.get("device") is not None else ())):
        if isinstance(value, torch.Tensor):
            return value.device
        if isinstance(value, (str, torch.device)):
            return torch.device(value)
    return None


def _without_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args and isinstance(args[0], (str, torch.device)):
        args = () if args[1:2] == (None,) else args[1:]  # Module.to may name a type that is None
    elif args and isinstance(args[0], torch.Tensor):
        args = (args[0].dtype, *args[1:])
    return args, {name: value for name, value in kwargs.items() if name != "device"}


@contextlib.contextmanager
def _accelerator(tracker: Tracker) -> Iterator[None]:
    """Let DeepSpeed's CPU accelerator call its device "cpu:0", and pin by a copy, as CUDA's does."""
    from deepspeed.accelerator import get_accelerator

    def pin_memory(tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        if tracker.is_pinned(tensor):
            return tensor
        with tracker.born_on(device=False, pinned=True):
            return tensor.clone()

    changed: dict[str, Callable[..., Any]] = {
        "device_name": lambda index=None: "cpu:0",
        "current_device_name": lambda: "cpu:0",
        "pin_memory": pin_memory,
        "on_accelerator": tracker.is_on_device,
        "available_memory": lambda index=None: 1 << 50,
        "total_memory": lambda index=None: 1 << 50,
    }
    accelerator = get_accelerator()
    for name, method in changed.items():
        setattr(accelerator, name, method)
    try:
        yield
    finally:
        for name in changed:
            delattr(accelerator, name)
