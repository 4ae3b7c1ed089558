"""How this process ends: signals as exceptions, and together with its parent process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_STOPS = (signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""
_libc = ctypes.CDLL(None)
PARENT_VARIABLE = "ZEROFIT_PARENT"
"""Process id of the agent of `zerofit launch`, set for the ranks that it starts."""


@contextlib.contextmanager
def stopping_by_exception() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise SystemExit inside, so that `with` and `finally` clean up.

    Signals that already have a handler keep it; outside the main thread nothing changes.
    """

    def stop(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    taken = []
    with contextlib.suppress(ValueError):  # not the main thread
        for number in _STOPS:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, stop)
                taken.append(number)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def end_with_agent() -> None:
    """Have the kernel kill this rank when the agent of `zerofit launch` that started it ends."""
    agent = os.environ.pop(PARENT_VARIABLE, None)  # it is not the parent of the script's own subprocesses
    if agent is not None:
        end_with_parent(int(agent))


def end_with_parent(parent: int, *, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel signal this process when the thread that started it ends (prctl(2)).

    Args:
        parent: process id of the parent; if it has ended already, this process exits at once.
        by: the signal.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:
        os._exit(1)
