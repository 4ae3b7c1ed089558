"""The processes of a captured script: below one that supervises them, so that all can be ended."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import resource
import signal
import subprocess
import time
from typing import TYPE_CHECKING, NoReturn

import psutil

from zerofit.core.processes import end_with_parent, has_ended
from zerofit.scripts.capture.environment import MARK

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_PR_SET_CHILD_SUBREAPER = 36
"""linux/prctl.h"""
_KILL_LIMIT_S = 5.0
"""Time limit for killed processes to disappear; one that hangs in the kernel may stay. ASSUMPTION."""
_POLL_INTERVAL_S = 0.01
_MAX_DESCRIPTORS = 1 << 20
"""fs/file.c, sysctl_nr_open"""


def supervised_preexec(lock: int) -> Callable[[], None]:
    """Return a preexec function that makes the new process supervise the program, which runs below it.

    The supervisor is a subreaper: what the program starts stays below it, also a daemon of another session
    (prctl(2)). It ends as the program ends, and when told to by SIGTERM or when this process ends; before, it
    kills everything below it. It never loads a program of its own, so it costs no start.

    Args:
        lock: a descriptor of this process that the supervisor keeps open, and the program does not.
    """
    return functools.partial(_supervise, os.getpid(), lock)


def end_supervised(process: subprocess.Popen[bytes]) -> None:
    """End a supervisor and everything below it, and wait until they are gone."""
    process.terminate()
    try:
        process.wait(timeout=_KILL_LIMIT_S)
    except subprocess.TimeoutExpired:  # a process below it hangs in the kernel
        process.kill()
        process.wait()


def kill_marked(mark: str) -> None:
    """Kill every process with a mark, for captures whose supervisor was killed too.

    Args:
        mark: the value of MARK in their environment.
    """
    until = time.monotonic() + _KILL_LIMIT_S
    while found := [process for process in psutil.process_iter() if _has_mark(process, mark)]:
        _kill(found)
        if time.monotonic() > until:
            return
        time.sleep(_POLL_INTERVAL_S)


def _has_mark(process: psutil.Process, mark: str) -> bool:
    with contextlib.suppress(psutil.Error, OSError):
        is_another = process.pid != os.getpid() and not has_ended(process)
        return is_another and process.environ().get(MARK) == mark
    return False


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


class _Told(Exception):  # noqa: N818 - not an error: zerofit says that it is enough
    """SIGTERM has arrived."""


def _tell(_: int, __: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # another would break off the ending
    raise _Told


def _supervise(parent: int, lock: int) -> None:
    """Fork the process that becomes the program, and return in it; the other one supervises it."""
    supervisor = os.getpid()
    program = os.fork()
    if program == 0:
        end_with_parent(supervisor)
        return
    status = signal.SIGKILL.value
    with contextlib.suppress(_Told):
        signal.signal(signal.SIGTERM, _tell)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        os.closerange(3, lock)
        os.closerange(max(3, lock + 1), _MAX_DESCRIPTORS)
        end_with_parent(parent, by=signal.SIGTERM)
        status = _wait_for(program)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # inside, so that none arrives between
    _end_all_below()
    _end_as(status)


def _wait_for(program: int) -> int:
    """Return the status of the program once it has ended; what it left behind is reaped meanwhile."""
    while True:
        ended, status = os.wait()
        if ended == program:
            return status


def _end_all_below() -> None:
    until = time.monotonic() + _KILL_LIMIT_S
    while time.monotonic() < until:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        below = psutil.Process().children(recursive=True)
        if not below:
            return
        _kill(below)
        time.sleep(_POLL_INTERVAL_S)


def _end_as(status: int) -> NoReturn:
    """End with a program's exit code, or by the signal that ended it."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))
