"""A time limit for work of this process that only reads."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


class TimeLimitReached(BaseException):
    """The limit was reached, wherever the work was."""


@contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    """End what runs inside after some seconds, also while it waits for a pipe or matches a pattern.

    Outside the main thread, which alone gets signals, there is no limit.

    Raises:
        TimeLimitReached: after limit_s.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise TimeLimitReached

    began = time.monotonic()
    previous = signal.signal(signal.SIGALRM, stop)
    left_s, interval_s = signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        if left_s:  # another's timer goes on
            signal.setitimer(signal.ITIMER_REAL, max(0.001, left_s - (time.monotonic() - began)), interval_s)
