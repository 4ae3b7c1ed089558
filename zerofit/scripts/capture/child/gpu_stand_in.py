"""A script's devices, all of them the CPU: what it moves to a GPU stays; what is on meta stays there."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

_DOES_NOTHING = (
    *("set_device", "synchronize", "empty_cache", "ipc_collect", "set_per_process_memory_fraction"),
    *("reset_peak_memory_stats", "reset_accumulated_memory_stats"),
    *("reset_max_memory_allocated", "reset_max_memory_cached"),
)
_COUNTS_BYTES = (
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
    *("memory_cached", "max_memory_cached"),
)
_NAME = "a GPU that stands in for yours"
_CAPABILITY = (8, 0)
"""ASSUMPTION: Ampere or later, so that a script that asks chooses bf16."""
_TOTAL_BYTES = 80 * 2**30
"""ASSUMPTION: of an A100 with 80 GB, as the 108 multiprocessors are; a script prints them before it trains.

Source: https://images.nvidia.com/aem-dam/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf
"""


def install(torch: ModuleType) -> None:
    """Send every tensor that the script puts on a GPU to the CPU; the script may name "cuda" outright."""
    from torch.overrides import TorchFunctionMode

    moves = {torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu}

    class OneDevice(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if function in moves:
                return _moved(torch, function, args, kwargs)
            if kwargs.get("device") is not None:
                kwargs = {**kwargs, "device": _stand_in(torch, kwargs["device"])}
            return function(*args, **kwargs)

    OneDevice().__enter__()
    _stand_in_for_gpu(torch)


def _moved(torch: Any, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return a tensor moved as the script says, or left where it is if that is a GPU, or meta."""
    tensor = args[0]
    if function is torch.Tensor.cuda or (function is torch.Tensor.cpu and tensor.is_meta):
        return tensor
    return function(
        tensor,
        *(_place(torch, tensor, value) for value in args[1:]),
        **{name: _place(torch, tensor, value) for name, value in kwargs.items()},
    )


def _place(torch: Any, tensor: Any, value: Any) -> Any:
    """Return an argument of Tensor.to with its device, if it has one, replaced."""
    if isinstance(value, torch.Tensor):  # to(other): the device and type of another
        return value if value.is_meta == tensor.is_meta else value.dtype
    is_device = isinstance(value, (str, torch.device)) or type(value) is int
    if not is_device:
        return value
    return torch.device("meta") if tensor.is_meta else _stand_in(torch, value)


def _stand_in(torch: Any, device: Any) -> Any:
    kind = "cuda" if isinstance(device, int) else torch.device(device).type
    return device if kind in ("cpu", "meta") else torch.device("cpu")


def _stand_in_for_gpu(torch: Any) -> None:
    """Let calls that only choose a GPU, wait for it or ask of what kind it is work."""
    if torch.cuda.is_available():
        return
    for name in _DOES_NOTHING:
        setattr(torch.cuda, name, lambda *_, **__: None)
    for name in _COUNTS_BYTES:
        setattr(torch.cuda, name, lambda *_, **__: 0)
    properties = SimpleNamespace(
        name=_NAME,
        major=_CAPABILITY[0],
        minor=_CAPABILITY[1],
        total_memory=_TOTAL_BYTES,
        multi_processor_count=108,
        warp_size=32,
        is_integrated=0,
        is_multi_gpu_board=0,
    )
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    torch.cuda.get_device_capability = lambda *_, **__: _CAPABILITY
    torch.cuda.get_device_name = lambda *_, **__: _NAME
    torch.cuda.get_device_properties = lambda *_, **__: properties
    torch.cuda.mem_get_info = lambda *_, **__: (_TOTAL_BYTES, _TOTAL_BYTES)
    torch.cuda.memory_stats = lambda *_, **__: Counter()
    torch.cuda.memory_summary = lambda *_, **__: ""
    torch.cuda.utilization = lambda *_, **__: 0
