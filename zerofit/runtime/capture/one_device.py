"""A script's devices, all of them the CPU: what it moves to a GPU stays; what is on meta stays there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType


def install(torch: ModuleType) -> None:
    """Send every tensor that the script puts on a GPU to the CPU; the script may name "cuda" outright.

    Args:
        torch: the module torch.
    """
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
    for name in ("set_device", "synchronize", "reset_peak_memory_stats", "empty_cache"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.current_device = lambda: 0
    # Scripts ask whether to train in bf16. ASSUMPTION: they will run on Ampere or later.
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    torch.cuda.get_device_capability = lambda *_: (8, 0)
