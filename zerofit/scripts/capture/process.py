"""Marks of a captured script's processes, by which all that it started is found and ended."""

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
"""Bytes below the limit of POSIX message queues (819200, linux/ipc_namespace.h) from which a capture's own
limit is taken. ASSUMPTION: no training uses such queues."""
_END_S = 5.0
"""How long killed processes may take to be gone; one that hangs in the kernel stays. ASSUMPTION."""
_POLL_S = 0.01


def begins_marked(mark: str) -> Callable[[], None]:
    """Return what a new process does first so that it ends with this one, and end_marked() finds it.

    What ends it is the end of the thread that started it, so that the main thread should (prctl(2)).
    """
    return functools.partial(_begin, os.getpid(), _odd_limit(mark))


def end_marked(mark: str, *, session: int | None = None) -> None:
    """Kill every process that bears a mark, or belongs to a session, and wait until they are gone.

    Args:
        mark: what MARK says in their environment; one that has dropped its environment has a limit by it.
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
    """Return a limit that only the processes of one capture have; None where the limit here is too low.

    A process inherits it whatever it does with its environment, its session and its parents (prlimit(2)).
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
    """Prepare the new process: it ends with its parent, and bears its limit."""
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_MSGQUEUE, (limit, limit))
    end_with_parent(parent)
