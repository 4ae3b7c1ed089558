"""trace_steps: what a script's own optimizer allocates, from its real step() on tensors without values."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from zerofit.core.allocation_log import Event
from zerofit.core.optimizers.step_trace import OwnSteps, StepTrace
from zerofit.core.upstream.torch import without_step_hooks
from zerofit.models.optimizer_copy import copy_on
from zerofit.models.trace.raw import CALL
from zerofit.models.trace.recorder import Recorder, watching

if TYPE_CHECKING:
    from collections.abc import Sequence

    Layout = tuple[tuple[int, ...], tuple[int, ...], Any, bool]
    """Shape, stride and dtype of a parameter, and whether it trains."""

_FLAT_ELEMENTS = 2**20
"""Of the flat tensors that stand for ZeRO's: a multiple of all blocks of quantized states."""
_LEAST_FLAT = 2**12
_SCALAR_BYTES = 8
"""Smaller blocks are left out: counters, which torch keeps on the host unless the step is fused."""
_SINGLE_BY_DEFAULT = ("Adafactor",)
"""torch's optimizers that step tensor by tensor unless told otherwise (torch/optim/_adafactor.py)."""


class _StepRecorder(Recorder):
    """Counts as well what operators on lists of tensors write, which return nothing."""

    written_bytes = 0

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = super().call(function, args, kwargs)
        if out is None and args and isinstance(args[0], (list, tuple)):
            self.written_bytes += sum(tensor.nbytes for tensor in args[0])
        return out


def trace_steps(optimizer: Any) -> OwnSteps:
    """Return what two steps of an optimizer allocate, on its own parameters and on flat ones.

    A copy of it steps, on fake tensors: the script's own, its states and the parameters stay as they are.

    Raises:
        Exception: any, of the optimizer's own code or of an operator without a form for fake tensors.
    """
    own = [[_layout(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    whole = _traced(optimizer, own)
    try:
        flat = _traced(optimizer, _flattened(own))
    except Exception:  # any: it looks at shapes
        flat = None
    return OwnSteps(own=whole, flat=flat)


def _layout(parameter: Any) -> Layout:
    return tuple(parameter.shape), tuple(parameter.stride()), parameter.dtype, bool(parameter.requires_grad)


def _flattened(groups: Sequence[Sequence[Layout]]) -> list[list[Layout]]:
    """Return one flat fp32 tensor for each group, with its share of the elements."""
    import torch

    elements = [sum(torch.Size(shape).numel() for shape, *_ in group) for group in groups]
    total = max(1, sum(elements))
    sizes = [
        max(1, round(_FLAT_ELEMENTS * element / total) // _LEAST_FLAT) * _LEAST_FLAT for element in elements
    ]
    return [[((size,), (1,), torch.float32, True)] for size in sizes]


def _traced(optimizer: Any, groups: Sequence[Sequence[Layout]]) -> StepTrace:
    """Return the trace of two steps of a copy on parameters of these layouts."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    recorder = _StepRecorder(is_padded=False, as_on_cuda=True)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        made = [[_parameter(layout) for layout in group] for group in groups]
    copied = copy_on(optimizer, made)
    _choose_as_on_cuda(copied)
    trained = [parameter for group in made for parameter in group if parameter.requires_grad]
    with ExitStack() as stack:
        stack.enter_context(fake)
        stack.enter_context(torch.no_grad())
        stack.enter_context(without_step_hooks())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
            recorder.ignore(parameter)
            recorder.ignore(parameter.grad)
        ends = []
        stack.enter_context(watching(recorder))
        _take_over_state(optimizer, copied, groups)
        for _ in range(2):
            recorder.written_bytes = 0
            type(copied).step(copied)
            ends.append(len(recorder.log.codes))
        recorder.close()
    return _trace_of(recorder, trained, ends)


def _parameter(layout: Layout) -> Any:
    import torch

    shape, stride, dtype, trains = layout
    return torch.nn.Parameter(torch.empty_strided(shape, stride, dtype=dtype), requires_grad=trains)


def _choose_as_on_cuda(optimizer: Any) -> None:
    """Choose foreach where the script leaves it to torch, which takes it on CUDA alone, and train mode."""
    name = type(optimizer).__name__
    if type(optimizer).__module__.startswith("torch.optim") and name not in _SINGLE_BY_DEFAULT:
        for group in optimizer.param_groups:
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = not group.get("differentiable", False)
    if all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval")):
        optimizer.train()  # schedule-free ones step in this mode alone


def _take_over_state(optimizer: Any, copied: Any, groups: Sequence[Sequence[Layout]]) -> None:
    """Make the states that the optimizer's constructor has made, such as Adagrad's sums."""
    import torch

    for group, own, layouts in zip(optimizer.param_groups, copied.param_groups, groups, strict=True):
        flat = len(layouts) != len(group["params"])
        for parameter, new in zip(group["params"], own["params"], strict=False):
            state = optimizer.state.get(parameter) or {}
            if not any(isinstance(value, torch.Tensor) for value in state.values()):
                continue
            copied.state[new] = {
                name: _like(value, parameter, new, is_flat=flat) for name, value in state.items()
            }


def _like(value: Any, parameter: Any, new: Any, *, is_flat: bool) -> Any:
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 0:
        return torch.zeros((), dtype=value.dtype)
    shape = new.shape if value.shape == parameter.shape or is_flat else value.shape
    return torch.empty(shape, dtype=new.dtype if value.dtype == parameter.dtype else value.dtype)


def _trace_of(recorder: _StepRecorder, trained: Sequence[Any], ends: Sequence[int]) -> StepTrace:
    log = recorder.log
    numbers = {
        index: number
        for number, index in enumerate(
            index for index, num_bytes in enumerate(log.num_bytes) if num_bytes > _SCALAR_BYTES
        )
    }
    steps: list[tuple[int, ...]] = []
    for start, stop in ((0, ends[0]), (ends[0], ends[1])):
        entries = []
        for code, argument in zip(log.codes[start:stop], log.arguments[start:stop], strict=True):
            if code in (Event.ALLOCATE, Event.FREE) and argument in numbers:
                entry = numbers[argument] + 1
                entries.append(entry if code == Event.ALLOCATE else -entry)
        steps.append(tuple(entries))
    kept = sorted({entry for entry in steps[0] if entry > 0} - {-entry for entry in steps[0] if entry < 0})
    calls = [
        log.calls[argument]
        for code, argument in zip(log.codes[ends[0] :], log.arguments[ends[0] :], strict=True)
        if code == CALL
    ]
    return StepTrace(
        elements=tuple(parameter.numel() for parameter in trained),
        element_bytes=tuple(parameter.element_size() for parameter in trained),
        sizes=tuple(log.num_bytes[index] for index in numbers),
        states=tuple(entry - 1 for entry in kept),
        first=steps[0],
        second=steps[1],
        moved_bytes=recorder.written_bytes + sum(call.num_bytes for call in calls),
        num_operators=len(calls),
    )
