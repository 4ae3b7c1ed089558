"""Tensors that autograd saves on the host, as under gradient checkpointing with offloaded activations."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from zerofit.models.trace.prepare import attribute_replaced

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.models.trace.recorder import Recorder


@contextmanager
def saved_on_host(recorder: Recorder) -> Iterator[None]:
    """Let torch's save_on_cpu move tensors off the traced GPU and back, whoever uses it.

    Tensors of a trace are on the CPU, where save_on_cpu would copy them into more of the GPU's memory.
    transformers' and accelerate's offload of checkpointed blocks' inputs use it, and scripts may. Integers
    and masks stay, as their values may decide what runs.
    """
    from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

    def pack(tensor: Any) -> Any:
        return recorder.to_host(tensor) if tensor.is_floating_point() else tensor

    def unpack(tensor: Any) -> Any:
        return recorder.from_host(tensor) if tensor.is_floating_point() else tensor

    def init(self: Any, pin_memory: bool = False, device_type: str = "cuda") -> None:
        saved_tensors_hooks.__init__(self, pack, unpack)

    with attribute_replaced(save_on_cpu, "__init__", init):
        yield
