"""A script's devices, all of them the CPU: what it moves to a GPU stays; what is on meta stays there."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from zerofit.scripts.capture.child.outcome import is_own_code

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

_DOES_NOTHING = (
    *("set_device", "synchronize", "empty_cache", "ipc_collect", "set_per_process_memory_fraction"),
    *("reset_peak_memory_stats", "reset_accumulated_memory_stats"),
    *("reset_max_memory_allocated", "reset_max_memory_cached"),
    *("manual_seed", "manual_seed_all", "seed", "seed_all", "set_stream", "init"),
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


def install(torch: ModuleType, note: Callable[[str], None]) -> None:
    """Send every tensor that the script puts on a GPU to the CPU; the script may name "cuda" outright."""
    from torch.overrides import TorchFunctionMode

    moves = {torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu}

    class OneDevice(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if function is torch.Tensor.pin_memory:
                return args[0]
            if function in moves:
                return _moved(torch, function, args, kwargs)
            if kwargs.get("device") is not None:
                kwargs = {**kwargs, "device": _stand_in(torch, kwargs["device"])}
            return function(*args, **kwargs)

    OneDevice().__enter__()
    _stand_in_for_gpu(torch, note)


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


def _stand_in_for_gpu(torch: Any, note: Callable[[str], None]) -> None:
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
    _answer_the_script(torch, note)
    _stand_in_for_objects(torch)
    _load_on_cpu(torch)
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    torch.cuda.get_device_capability = lambda *_, **__: _CAPABILITY
    torch.cuda.get_device_name = lambda *_, **__: _NAME
    torch.cuda.get_device_properties = lambda *_, **__: properties
    torch.cuda.mem_get_info = lambda *_, **__: (_TOTAL_BYTES, _TOTAL_BYTES)
    torch.cuda.memory_stats = lambda *_, **__: Counter()
    torch.cuda.memory_summary = lambda *_, **__: ""
    torch.cuda.utilization = lambda *_, **__: 0


def _answer_the_script(torch: Any, note: Callable[[str], None]) -> None:
    """Let the script's own code see one GPU; libraries see none, and choose the CPU for what they make."""
    is_available, device_count = torch.cuda.is_available, torch.cuda.device_count

    def has_gpu() -> bool:
        return is_own_code(sys._getframe(1).f_code.co_filename) or is_available()

    def num_gpus() -> int:
        if not is_own_code(sys._getframe(1).f_code.co_filename):
            return int(device_count())
        note("the script asks how many GPUs there are, and was told 1")
        return 1

    torch.cuda.is_available, torch.cuda.device_count = has_gpu, num_gpus


class _Idle:
    """A stream, an event or a context of a GPU that does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = "cpu"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def query(self) -> bool:
        """Return that all work is done."""
        return True

    def elapsed_time(self, _: Any) -> float:
        """Return the milliseconds up to another event."""
        return 0.0

    def nothing(self, *_: Any, **__: Any) -> Self:
        """Do nothing: in the place of waiting and recording."""
        return self

    record = synchronize = wait = wait_event = wait_stream = record_event = nothing


def _stand_in_for_objects(torch: Any) -> None:
    """Let streams, events, contexts, generators and random states of a GPU be made."""
    for name in ("Event", "Stream", "ExternalStream", "StreamContext", "device", "device_of"):
        setattr(torch.cuda, name, _Idle)
    for name in ("stream", "current_stream", "default_stream"):
        setattr(torch.cuda, name, _Idle)
    for name in ("mark", "range_push", "range_pop", "range"):
        setattr(torch.cuda.nvtx, name, _Idle)
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.cuda.get_rng_state_all = lambda: [torch.get_rng_state()]
    torch.cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    torch.cuda.set_rng_state_all = lambda states: torch.set_rng_state(states[0])
    torch.cuda.initial_seed = torch.initial_seed
    own = torch.Generator

    class GeneratorType(type):
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, own)

    class Generator(metaclass=GeneratorType):
        def __new__(cls, device: Any = "cpu") -> Any:
            return own(_stand_in(torch, device))

    torch.Generator = Generator


def _load_on_cpu(torch: Any) -> None:
    """Load onto the CPU what the script loads onto a GPU, and let it join a process group of GPUs."""
    load, join = torch.load, torch.distributed.init_process_group

    @functools.wraps(load)
    def load_here(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(map_location, (str, int, torch.device)):
            map_location = _stand_in(torch, map_location)
        return load(file, map_location, *args, **kwargs)

    @functools.wraps(join)
    def join_here(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return join("gloo" if "nccl" in str(backend) else backend, *args, **kwargs)

    torch.load, torch.distributed.init_process_group = load_here, join_here
    for storage in (torch.UntypedStorage, torch.TypedStorage):
        storage.cuda = lambda self, *_, **__: self


def install_for_safetensors(safetensors: ModuleType) -> None:
    """Open files of weights on the CPU wherever the script says."""
    opened = safetensors.safe_open

    @functools.wraps(opened, updated=())
    def open_here(filename: Any, framework: Any, device: Any = "cpu", **kwargs: Any) -> Any:
        return opened(filename, framework, "meta" if str(device) == "meta" else "cpu", **kwargs)

    for module in (safetensors, sys.modules.get("safetensors.torch")):
        if module is not None:
            vars(module)["safe_open"] = open_here
