"""Bounds for code that is not ours and runs in this process: time, memory."""

from __future__ import annotations

import contextlib
import resource
import signal
import threading
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


@contextlib.contextmanager
def bounded_time(limit_s: float) -> Iterator[None]:
    """Raise TimeoutError in this context after some seconds, wherever its Python code is.

    Only the main thread can be interrupted; other threads have no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it did not end within {limit_s:g} s")

    previous = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@contextlib.contextmanager
def bounded_memory(more_bytes: int) -> Iterator[None]:
    """Raise MemoryError in this context once the process has taken that much more address space."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = psutil.Process().memory_info().vms + more_bytes
    if soft != resource.RLIM_INFINITY:
        wanted = min(wanted, soft)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
