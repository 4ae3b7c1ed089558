"""Marks of a captured script's processes, by which all that it started is found and ended."""

from __future__ import annotations

import contextlib
import os
import time

import psutil

from zerofit.scripts.capture.environment import MARK

_END_S = 5.0
"""How long killed processes may take to be gone; one that hangs in the kernel stays. ASSUMPTION."""
_POLL_S = 0.01


def end_marked(mark: str, *, session: int | None = None) -> None:
    """Kill every process that bears a mark, or belongs to a session, and wait until they are gone.

    Args:
        mark: what MARK says in their environment.
        session: a session whose leader is not reaped yet, and is left to the caller.
    """
    until = time.monotonic() + _END_S
    while found := [one for one in psutil.process_iter() if _belongs(one, mark, session)]:
        for one in found:
            with contextlib.suppress(psutil.Error):
                one.kill()
        if time.monotonic() > until:
            return
        time.sleep(_POLL_S)


def _belongs(process: psutil.Process, mark: str, session: int | None) -> bool:
    if process.pid in (os.getpid(), session):
        return False
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        is_inside = session is not None and os.getsid(process.pid) == session
        return is_inside or process.environ().get(MARK) == mark
    except (psutil.Error, OSError):
        return False
