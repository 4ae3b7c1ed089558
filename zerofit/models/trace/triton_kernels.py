"""Triton kernels in a trace: a launch does nothing, since its outputs are allocated before it."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def silent_kernels() -> Iterator[None]:
    """Allow kernels of a script's libraries, such as Liger's, to be traced without a GPU.

    Python allocates a kernel's outputs, so the log matches the GPU's; the kernels' time is not counted.
    Nothing is done if the script has not imported Triton.
    """
    jit = sys.modules.get("triton.runtime.jit")
    if jit is None:
        yield
        return
    import torch

    triton = sys.modules["triton"]
    places: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
        (jit.KernelInterface, "__getitem__", lambda *_: _launch_nothing),
        (triton, "next_power_of_2", _evenly(triton.next_power_of_2)),
        (torch, "equal", _as_if_equal(torch.equal)),
    )
    own = [getattr(holder, name) for holder, name, _ in places]
    try:
        for holder, name, instead in places:
            setattr(holder, name, instead)
        yield
    finally:
        for (holder, name, _), function in zip(places, own, strict=True):
            setattr(holder, name, function)


def _launch_nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _as_if_equal(equal: Callable[..., bool]) -> Callable[..., bool]:
    """Return a torch.equal by which Liger's losses check if the incoming gradient is 1; allocates nothing."""

    def ask(one: Any, other: Any) -> bool:
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        return caller.startswith("liger_kernel.") or equal(one, other)

    return ask


def _evenly(next_power_of_2: Callable[[int], int]) -> Callable[[int], int]:
    """Return the function so that Liger's loss splits a batch into the same number of chunks at any size.

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
