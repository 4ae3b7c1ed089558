"""The script's devices, all replaced by the CPU: moves to a GPU do nothing; meta tensors stay on meta."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from zerofit.core.facts import GpuSpec
from zerofit.scripts.capture.cache import STAND_IN_GPU, gpu_words
from zerofit.scripts.capture.child.outcome import is_own_code
from zerofit.scripts.capture.nvidia_smi import ASKED

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from zerofit.scripts.capture.child.observations import Observations

_NO_OPS = (
    "set_device",
    "synchronize",
    "empty_cache",
    "ipc_collect",
    "set_per_process_memory_fraction",
    "reset_peak_memory_stats",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_stream",
    "init",
)
_MEMORY_COUNTERS = (
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "memory_cached",
    "max_memory_cached",
)
_CAPABILITY = (8, 0)
"""ASSUMPTION: Ampere or newer, so that scripts choose bf16."""
_GPU_PROPERTIES = {"multi_processor_count": 108, "warp_size": 32, "is_integrated": 0, "is_multi_gpu_board": 0}
"""ASSUMPTION: multiprocessors of an A100, for any plan; scripts only print them.

Source:
https://images.nvidia.com/aem-dam/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf
"""


def install(torch: ModuleType, seen: Observations) -> None:
    """Redirect every tensor that the script moves to a GPU to the CPU, even if it names "cuda"."""
    from torch.overrides import TorchFunctionMode

    moves = {torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu}

    class OneDevice(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if function is torch.Tensor.pin_memory:
                return args[0]
            if function in moves:
                return _moved(torch, function, args, kwargs)
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
            if kwargs.get("device") is not None:
                kwargs = {**kwargs, "device": _stand_in(torch, kwargs["device"])}
            return function(*args, **kwargs)

    OneDevice().__enter__()
    _stand_in_for_gpu(torch, seen)


def _moved(torch: Any, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return a tensor moved as requested, or unchanged if the target is a GPU, or the tensor on meta."""
    tensor = args[0]
    if function is torch.Tensor.cuda or (function is torch.Tensor.cpu and tensor.is_meta):
        return tensor
    return function(
        tensor,
        *(_place(torch, tensor, value) for value in args[1:]),
        **{name: _place(torch, tensor, value) for name, value in kwargs.items()},
    )


def _place(torch: Any, tensor: Any, value: Any) -> Any:
    """Return an argument of Tensor.to with its device, if any, replaced."""
    if isinstance(value, torch.Tensor):  # to(other): the device and dtype of another
        return value if value.is_meta == tensor.is_meta else value.dtype
    is_device = isinstance(value, (str, torch.device)) or type(value) is int
    if not is_device:
        return value
    return torch.device("meta") if tensor.is_meta else _stand_in(torch, value)


def _stand_in(torch: Any, device: Any) -> Any:
    kind = "cuda" if isinstance(device, int) else torch.device(device).type
    return device if kind in ("cpu", "meta") else torch.device("cpu")


def _stand_in_for_gpu(torch: Any, seen: Observations) -> None:
    """Make calls work that only select a GPU, synchronize with it or query its properties."""
    if torch.cuda.is_available():
        return
    for name in _NO_OPS:
        setattr(torch.cuda, name, lambda *_, **__: None)
    for name in _MEMORY_COUNTERS:
        setattr(torch.cuda, name, lambda *_, **__: 0)
    _show_planned_gpus(torch, seen)
    _stand_in_for_objects(torch)
    _load_on_cpu(torch)
    _wrap_on_cpu(torch)
    torch.cuda.current_device = lambda: 0
    torch.cuda.memory_stats = lambda *_, **__: Counter()
    torch.cuda.memory_summary = lambda *_, **__: ""
    torch.cuda.utilization = lambda *_, **__: 0


def _show_planned_gpus(torch: Any, seen: Observations) -> None:
    """Show the planned GPUs to the script's own code; libraries see none, or a generic one.

    Libraries then create tensors on the CPU, and get the same GPU properties for every plan.
    """
    is_available, device_count = torch.cuda.is_available, torch.cuda.device_count

    def is_asked() -> bool:
        if not is_own_code(sys._getframe(2).f_code.co_filename):
            return False
        _note_shown_gpus(seen)
        return True

    def gpu_for(device: Any) -> GpuSpec:
        if not is_own_code(sys._getframe(2).f_code.co_filename):
            return STAND_IN_GPU
        _note_shown_gpus(seen)
        return _gpu_at(seen, device)

    def has_gpu() -> bool:
        return is_own_code(sys._getframe(1).f_code.co_filename) or is_available()

    def num_gpus() -> int:
        return len(_gpus_of(seen)) if is_asked() else int(device_count())

    def capability(device: Any = None) -> tuple[int, int]:
        return _capability_of(gpu_for(device))

    def name(device: Any = None) -> str:
        return gpu_for(device).name

    def properties(device: Any = None) -> SimpleNamespace:
        gpu = gpu_for(device)
        major, minor = _capability_of(gpu)
        total = gpu.memory_bytes
        return SimpleNamespace(**_GPU_PROPERTIES, name=gpu.name, major=major, minor=minor, total_memory=total)

    def memory(device: Any = None) -> tuple[int, int]:
        gpu = gpu_for(device)
        return gpu.memory_bytes, gpu.memory_bytes

    def has_bf16(*_: Any, **__: Any) -> bool:
        return _capability_of(gpu_for(None)) >= _CAPABILITY

    torch.cuda.is_available, torch.cuda.device_count = has_gpu, num_gpus
    torch.cuda.get_device_capability, torch.cuda.get_device_name = capability, name
    torch.cuda.get_device_properties, torch.cuda.mem_get_info = properties, memory
    torch.cuda.is_bf16_supported = has_bf16


def _gpus_of(seen: Observations) -> tuple[GpuSpec, ...]:
    return seen.spec.gpus or (STAND_IN_GPU,)


def _capability_of(gpu: GpuSpec) -> tuple[int, int]:
    return gpu.compute_capability or _CAPABILITY


def _gpu_at(seen: Observations, device: Any) -> GpuSpec:
    """Return the GPU for an index, a name such as "cuda:1" or a torch.device; the first without one."""
    gpus = _gpus_of(seen)
    number = str(getattr(device, "index", device) or 0).rpartition(":")[2]
    return gpus[min(int(number), len(gpus) - 1)] if number.isdigit() else gpus[0]


def _note_shown_gpus(seen: Observations) -> None:
    if not seen.told_gpus:
        seen.told_gpus = gpu_words(_gpus_of(seen))
        seen.note(f"the script asks for the GPUs of its node, and was shown {seen.told_gpus}")


def shown_gpus(seen: Observations) -> str:
    """Return the GPUs shown to the script; empty if it did not ask."""
    if (seen.folder / ASKED).exists():
        _note_shown_gpus(seen)
    return seen.told_gpus


def install_for_nvml(pynvml: ModuleType, seen: Observations) -> None:
    """Answer the script's NVML queries for the planned node."""

    def answered(name: str, answer: Callable[..., Any]) -> None:
        original = getattr(pynvml, name, None)

        def answering(*args: Any, **kwargs: Any) -> Any:
            if not is_own_code(sys._getframe(1).f_code.co_filename):
                return original(*args, **kwargs) if original is not None else None
            _note_shown_gpus(seen)
            return answer(*args)

        setattr(pynvml, name, answering)

    def memory(gpu: GpuSpec) -> SimpleNamespace:
        return SimpleNamespace(total=gpu.memory_bytes, free=gpu.memory_bytes, used=0)

    for name in ("nvmlInit", "nvmlInit_v2", "nvmlShutdown"):
        answered(name, lambda *_: None)
    answered("nvmlDeviceGetCount", lambda: len(_gpus_of(seen)))
    answered("nvmlDeviceGetHandleByIndex", lambda number: _gpu_at(seen, number))
    answered("nvmlDeviceGetName", lambda gpu: gpu.name)
    answered("nvmlDeviceGetMemoryInfo", memory)
    answered("nvmlDeviceGetCudaComputeCapability", _capability_of)
    answered("nvmlDeviceGetUtilizationRates", lambda _: SimpleNamespace(gpu=0, memory=0))


class _NoOp:
    """A stream, an event or a context of a GPU that does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = "cpu"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def elapsed_time(self, _: Any) -> float:
        """Return 0 milliseconds to another event."""
        return 0.0

    def nothing(self, *_: Any, **__: Any) -> Self:
        """Do nothing, for waiting and recording."""
        return self

    record = synchronize = wait = wait_event = wait_stream = record_event = nothing


def _stand_in_for_objects(torch: Any) -> None:
    """Make streams, events, contexts, generators and random states of a GPU constructible."""
    streams = ("Stream", "ExternalStream", "StreamContext", "stream", "current_stream", "default_stream")
    for name in (*streams, "Event", "device", "device_of"):
        setattr(torch.cuda, name, _NoOp)
    for name in ("mark", "range_push", "range_pop", "range"):
        setattr(torch.cuda.nvtx, name, _NoOp)
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


def _wrap_on_cpu(torch: Any) -> None:
    """Let DistributedDataParallel wrap a CPU model even if the script passes its GPU."""
    ddp = torch.nn.parallel.DistributedDataParallel
    original = ddp.__init__

    @functools.wraps(original)
    def init(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **kwargs: Any
    ) -> None:
        original(self, module, **kwargs)

    ddp.__init__ = init


def _load_on_cpu(torch: Any) -> None:
    """Redirect torch.load to the CPU, and process groups from NCCL to gloo."""
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
    """Open safetensors files on the CPU whatever device the script passes."""
    opened = safetensors.safe_open

    @functools.wraps(opened, updated=())
    def open_here(filename: Any, framework: Any, device: Any = "cpu", **kwargs: Any) -> Any:
        return opened(filename, framework, "meta" if str(device) == "meta" else "cpu", **kwargs)

    for module in (safetensors, sys.modules.get("safetensors.torch")):
        if module is not None:
            vars(module)["safe_open"] = open_here
