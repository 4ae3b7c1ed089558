"""Skips Triton kernels in a trace, since their outputs are allocated before the launch."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from zerofit.models.trace.prepare import attribute_replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def kernels_skipped(note_kernel: Callable[..., None]) -> Iterator[None]:
    """Skip Triton kernels inside, such as Liger's, which can't run without a GPU.

    Python code allocates a kernel's outputs, so the log matches the GPU's. Does nothing if the script has not
    imported Triton.

    Args:
        note_kernel: is called with the kernel's arguments in its place.
    """
    jit = sys.modules.get("triton.runtime.jit")
    if jit is None:
        yield
        return
    import torch

    triton = sys.modules["triton"]
    with (
        attribute_replaced(jit.KernelInterface, "__getitem__", lambda *_: note_kernel),
        attribute_replaced(triton, "next_power_of_2", _evenly(triton.next_power_of_2)),
        attribute_replaced(torch, "equal", _as_if_equal(torch.equal)),
    ):
        yield


def _as_if_equal(equal: Callable[..., bool]) -> Callable[..., bool]:
    """Return a torch.equal that is True in Liger's losses, which compare the incoming gradient with 1."""

    def ask(kernel: Any, other: Any) -> bool:
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        return caller.startswith("liger_kernel.") or equal(kernel, other)

    return ask


def _evenly(next_power_of_2: Callable[[int], int]) -> Callable[[int], int]:
    """Return a next_power_of_2 with which Liger's loss splits batches of any size into as many chunks.

    Liger rounds the tokens of a chunk up to a power of two: if samples and length are powers of two, the
    result is the same, else up to twice as many tokens.
    Source: liger_kernel/ops/fused_linear_cross_entropy.py, fused_linear_cross_entropy_forward (0.8.5).
    """

    def pieces(number: int) -> int:
        caller = sys._getframe(1).f_locals
        if {"BT", "inc_factor"} <= caller.keys():
            return -(-int(caller["BT"]) // (1 << int(caller["inc_factor"]).bit_length() - 1))
        return next_power_of_2(number)

    return pieces
