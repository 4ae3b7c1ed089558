"""Signals that end this process, as exceptions, for as long as others depend on it."""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_STOPS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def stopping_by_exception() -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise SystemExit here, so that what `with` and `finally` promise is done.

    What handles a signal already, and every thread but the main one, stays as it is.
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
