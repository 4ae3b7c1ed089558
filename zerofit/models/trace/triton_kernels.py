"""Triton kernels in a trace: a launch does nothing, as the tensors it writes to were allocated before it."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def silent_kernels() -> Iterator[None]:
    """Let the kernels of a script's libraries, such as Liger's, be traced without a GPU.

    Python allocates what a kernel writes, so that the log is that of the GPU; the time of the kernels
    themselves is not counted. Nothing is done where no script has imported Triton.
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
    """Return torch.equal, by which Liger's losses ask if the incoming gradient is 1; it allocates nothing."""

    def ask(one: Any, other: Any) -> bool:
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        return caller.startswith("liger_kernel.") or equal(one, other)

    return ask


def _evenly(next_power_of_2: Callable[[int], int]) -> Callable[[int], int]:
    """Return the function, by which Liger's loss cuts a batch into as many pieces whatever its size.

    Liger rounds the tokens of a piece up to a power of two: where samples and length are such powers, the
    result is the same, and up to twice as many tokens else.
    Source: liger_kernel/ops/fused_linear_cross_entropy.py, fused_linear_cross_entropy_forward (0.8.5).
    """

    def pieces(number: int) -> int:
        caller = sys._getframe(1).f_locals
        if {"BT", "inc_factor"} <= caller.keys():
            return -(-int(caller["BT"]) // (1 << int(caller["inc_factor"]).bit_length() - 1))
        return next_power_of_2(number)

    return pieces
