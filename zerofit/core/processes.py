"""Whether processes have ended, also where nobody takes their exit code; and how one ends with its parent.

A process whose parent has died belongs to the first process of its container. Where that one takes no exit
codes (`docker run IMAGE zerofit ...` without `--init`), it stays in the table of processes as a zombie for as
long as the container lives: it runs no more, holds no memory and no file, but psutil.wait_procs() and
psutil.pid_exists() count it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable

import psutil

_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""
_libc = ctypes.CDLL(None)
_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def has_ended(process: psutil.Process) -> bool:
    """Return True if a process runs no more; False as well for one that may not be looked at."""
    try:
        return not process.is_running() or process.status() in _ENDED
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def is_running(pid: int) -> bool:
    """Return True if a process of this id exists that has not ended."""
    try:
        return not has_ended(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True


def wait_for_end(processes: Iterable[psutil.Process], *, within_s: float) -> list[psutil.Process]:
    """Wait until all processes have ended, or the time is over.

    Args:
        processes: of any parent; children of this process are reaped.
        within_s: in seconds; 0 only looks.

    Returns:
        Those that still run.
    """
    until = time.monotonic() + within_s
    running = list(processes)
    while True:
        _, present = psutil.wait_procs(running, timeout=0)
        running = [process for process in present if not has_ended(process)]
        psutil.wait_procs(set(present) - set(running), timeout=0)  # children that have ended since
        if not running or time.monotonic() >= until:
            return running
        time.sleep(_POLL_S)


def end_with_parent(parent: int, *, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel signal this process when the thread that started it ends (prctl(2)).

    Args:
        parent: process id of the parent; if it has ended already, this process exits at once.
        by: the signal.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:
        os._exit(1)
