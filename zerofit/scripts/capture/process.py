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

_MARKING_LIMITS = 400_000
"""Bytes below the limit of POSIX message queues (819200, linux/ipc_namespace.h) used for a capture's own
limit. ASSUMPTION: no training uses such queues."""
_KILL_LIMIT_S = 5.0
"""Time limit for killed processes to disappear; one that hangs in the kernel may stay. ASSUMPTION."""
_POLL_INTERVAL_S = 0.01


def marking_preexec(mark: str) -> Callable[[], None]:
    """Return a preexec function by which a new process ends with this one, and kill_marked() finds it.

    It ends with the thread that started it, which should be the main thread (prctl(2)).
    """
    return functools.partial(_prepare_child, os.getpid(), _marking_limit(mark))


def kill_marked(mark: str, *, session: int | None = None) -> None:
    """Kill every process with a mark, or in a session, and wait until they are gone.

    Args:
        mark: the value of MARK in their environment; processes that cleared it are found by their limit.
        session: a session whose leader is not reaped yet, and is left to the caller.
    """
    until, limit = time.monotonic() + _KILL_LIMIT_S, _marking_limit(mark)
    while found := [one for one in psutil.process_iter() if _belongs(one, mark, limit, session)]:
        for one in found:
            with contextlib.suppress(psutil.Error):
                one.kill()
        if time.monotonic() > until:
            return
        time.sleep(_POLL_INTERVAL_S)


def _marking_limit(mark: str) -> int | None:
    """Return a resource limit that marks the processes of one capture; None if the present one is too low.

    A process inherits it even if it changes its environment, session and parent (prlimit(2)).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_MSGQUEUE)
    most = 1 << 40 if hard == resource.RLIM_INFINITY else hard
    return most - 1 - zlib.crc32(mark.encode()) % _MARKING_LIMITS if most > _MARKING_LIMITS else None


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


def _prepare_child(parent: int, limit: int | None) -> None:
    """Make this new process end with its parent, and mark it by the limit."""
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_MSGQUEUE, (limit, limit))
    end_with_parent(parent)
