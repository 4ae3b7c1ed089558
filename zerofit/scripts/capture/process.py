"""Marks of a captured script's processes, by which all its children are found and ended."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import time
import zlib
from typing import TYPE_CHECKING

import psutil

from zerofit.machine.stopping import end_with_parent
from zerofit.scripts.capture.environment import MARK

if TYPE_CHECKING:
    from collections.abc import Callable

_ODD_LIMITS = 400_000
"""Bytes below the limit of POSIX message queues (819200, linux/ipc_namespace.h) used for a capture's own
limit. ASSUMPTION: no training uses such queues."""
_END_S = 5.0
"""Time limit for killed processes to disappear; one that hangs in the kernel may stay. ASSUMPTION."""
_POLL_S = 0.01


def begins_marked(mark: str) -> Callable[[], None]:
    """Return a preexec function so that a new process ends with this one, and end_marked() finds it.

    It ends with the thread that started it, which should be the main thread (prctl(2)).
    """
    return functools.partial(_begin, os.getpid(), _odd_limit(mark))


def end_marked(mark: str, *, session: int | None = None) -> None:
    """Kill every process with a mark, or in a session, and wait until they are gone.

    Args:
        mark: the value of MARK in their environment; processes that cleared it are found by their limit.
        session: a session whose leader is not reaped yet, and is left to the caller.
    """
    until, limit = time.monotonic() + _END_S, _odd_limit(mark)
    while found := [one for one in psutil.process_iter() if _belongs(one, mark, limit, session)]:
        for one in found:
            with contextlib.suppress(psutil.Error):
                one.kill()
        if time.monotonic() > until:
            return
        time.sleep(_POLL_S)


def _odd_limit(mark: str) -> int | None:
    """Return a limit that only the processes of one capture have; None if the limit here is too low.

    A process inherits it even if it changes its environment, session and parent (prlimit(2)).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_MSGQUEUE)
    most = 1 << 40 if hard == resource.RLIM_INFINITY else hard
    return most - 1 - zlib.crc32(mark.encode()) % _ODD_LIMITS if most > _ODD_LIMITS else None


def _belongs(process: psutil.Process, mark: str, limit: int | None, session: int | None) -> bool:
    if process.pid in (os.getpid(), session):
        return False
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        is_inside = session is not None and os.getsid(process.pid) == session
        is_limited = resource.prlimit(process.pid, resource.RLIMIT_MSGQUEUE)[1] == limit
        return is_inside or is_limited or process.environ().get(MARK) == mark
    except (psutil.Error, OSError):
        return False


def _begin(parent: int, limit: int | None) -> None:
    """Prepare the new process: it ends with its parent, and has the limit."""
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_MSGQUEUE, (limit, limit))
    end_with_parent(parent)
