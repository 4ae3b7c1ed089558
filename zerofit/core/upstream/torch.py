"""Differences between releases of torch, from 2.8 on."""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager
    from datetime import timedelta

BACKWARD = "_engine_run_backward"
"""The last Python function of a backward pass (torch/autograd/graph.py)."""
MODULE_CALLS = ("_wrapped_call_impl", "_call_impl")
"""Functions between a call of a module and its forward() (torch/nn/modules/module.py)."""
THREAD_START = "_bootstrap"
"""The outermost function of a thread that Python has started (threading.py); torch's own have none."""


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
    return any("_orig_mod" in part._modules or part._compiled_call_impl is not None for part in modules)


def is_in_backward() -> bool:
    """Return True inside a backward pass, including recomputation of a checkpointed block (torch 2.13)."""
    import torch

    return bool(torch._C._current_graph_task_id() != -1)


def count_collectives() -> int:
    """Return how many collectives this process has called, in all of its process groups together.

    From any thread, while another one calls them.
    """
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    groups = [] if c10d is None else list(getattr(getattr(c10d, "_world", None), "pg_map", ()))
    called = 0
    for group in groups:
        with contextlib.suppress(RuntimeError, AttributeError):  # a backend that does not count
            called += int(group._get_sequence_number_for_group())
    return called


def sparse_parts(tensor: Any) -> tuple[Any, Any]:
    """Return the indices and values of a sparse tensor, coalesced or not."""
    return tensor._indices(), tensor._values()


def known_device(tensor: Any) -> Any:
    """Return the device of a fake tensor without a dispatch; None of others.

    Autograd asks for it at each edge. Source: torch/_subclasses/fake_tensor.py, _device_handler.
    """
    if type(tensor).__name__ == "FakeTensor" and not tensor.fake_mode.in_kernel_invocation:
        return tensor.fake_device
    return None


PACKS, UNPACKS = "_pack_padded_sequence", "_pad_packed_sequence"
"""Names of the functions of packed sequences in recurrent_functions()."""


def recurrent_functions() -> tuple[Any, dict[str, Any]]:
    """Return the holder of the functions that recurrent layers call, and those of plain RNNs by their kind.

    Source: torch/nn/modules/rnn.py; torch/nn/utils/rnn.py.
    """
    from torch import _VF
    from torch.nn.modules import rnn

    return _VF, rnn._rnn_impls


def without_modes() -> AbstractContextManager[None]:
    """Return a context in which operators are not passed to dispatch modes, such as FakeTensorMode."""
    from torch.utils._python_dispatch import _disable_current_modes

    context: AbstractContextManager[None] = _disable_current_modes()
    return context


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


HOOK_FIELDS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Fields of an optimizer that hold its hooks around step(), by their ids (torch/optim/optimizer.py)."""


@contextlib.contextmanager
def without_step_hooks() -> Iterator[None]:
    """Run no hooks for all optimizers in this context: others would count steps of copies."""
    from torch.optim import optimizer as module

    hooks = (module._global_optimizer_pre_hooks, module._global_optimizer_post_hooks)
    before = [dict(some) for some in hooks]
    for some in hooks:
        some.clear()
    try:
        yield
    finally:
        for some, kept in zip(hooks, before, strict=True):
            some.update(kept)


@contextlib.contextmanager
def taken_step_hooks(optimizers: Iterable[Any], *, stay: Callable[[Any], bool]) -> Iterator[list[list[Any]]]:
    """Take the hooks around step() from optimizers, in this context.

    Args:
        optimizers: torch.optim.Optimizers.
        stay: returns True for a hook that is not taken.

    Yields:
        the hooks before and those after a step, to be called without arguments.
    """
    held = [[(stepper, getattr(stepper, name)) for stepper in optimizers] for name in HOOK_FIELDS]
    before = [dict(hooks) for fields in held for _, hooks in fields]
    taken: list[list[Any]] = [[], []]
    for calls, fields in zip(taken, held, strict=True):
        for optimizer, hooks in fields:
            for key in [key for key, hook in hooks.items() if not stay(hook)]:
                calls.append(functools.partial(hooks.pop(key), optimizer, (), {}))
    try:
        yield taken
    finally:
        for kept, (_, hooks) in zip(before, (field for fields in held for field in fields), strict=True):
            hooks.update(kept)


def move_step_hooks(optimizer: Any, new: Any) -> None:
    """Give an optimizer's hooks around step() to the one that replaces it."""
    for name in HOOK_FIELDS:
        getattr(new, name).update(getattr(optimizer, name))


def accumulated_hooks(parameter: Any) -> list[Any]:
    """Return the hooks that run once a parameter's gradient is accumulated."""
    return list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())


def num_function_modes() -> int:
    """Return how many TorchFunctionModes are active, such as `with torch.device(...)`."""
    import torch

    return int(torch._C._len_torch_function_stack())


def is_innermost_mode(mode: Any) -> bool:
    """Return True if a TorchFunctionMode is the active one that was entered last."""
    import torch

    last = num_function_modes() - 1
    return last >= 0 and torch._C._get_function_stack_at(last) is mode


def scheduled_rates(scheduler: Any) -> list[float] | None:
    """Return the learning rates of a scheduler at its count; None if they follow from earlier ones alone."""
    from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

    closed_form = getattr(scheduler, "_get_closed_form_lr", None)
    if closed_form is not None:
        return [float(rate) for rate in closed_form()]
    if not isinstance(scheduler, LambdaLR | OneCycleLR):
        return None
    scheduler._get_lr_called_within_step = True  # else it warns
    try:
        return [float(rate) for rate in scheduler.get_lr()]
    finally:
        scheduler._get_lr_called_within_step = False


def counted_schedule(own: dict[str, Any], loaded: dict[str, Any], factor: float) -> dict[str, Any] | None:
    """Return a scheduler's own state with a loaded count and rates; None if the count gets no whole number.

    Args:
        own: its state as a script has made it.
        loaded: the state with the count, of another length.
        factor: what the count is multiplied by.
    """
    count = loaded.get("last_epoch", 0) * factor
    if "_last_lr" not in loaded or abs(count - round(count)) > 1e-9:
        return None
    steps = loaded.get("_step_count", 1) - loaded["last_epoch"] + round(count)
    return {**own, "last_epoch": round(count), "_step_count": steps, "_last_lr": loaded["_last_lr"]}
