"""How this process ends: signals as exceptions, and together with its parent process."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

from zerofit.core.processes import end_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_STOPS = (signal.SIGTERM, signal.SIGHUP)
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
