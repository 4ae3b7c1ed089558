"""Runs the launch command, passes signals on, and leaves no process behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PR_SET_CHILD_SUBREAPER = 36
"""linux/prctl.h: orphaned grandchildren become our children, so that they can be found and ended."""
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_POLL_S = 0.05
_TERMINAL_HEAD_START_S = 2.0
"""A terminal sends Ctrl-C to the whole process group itself; only where nobody reacts is it sent on."""
_STOP_GRACE_S = 35.0
"""torchrun kills its ranks 30 s after it was told to stop (torch/distributed/elastic); this is a bit more."""
_DRAIN_S = 3.0
"""What copies the ranks' output ends with them; it gets this long to write the last lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How the command ended."""

    exit_code: int
    """Of the command; negative for the signal that killed it."""
    stopped_by: signal.Signals | None
    """The signal that we were sent meanwhile; None where none was."""


def run_watched(command: Sequence[str], *, environment: Mapping[str, str]) -> Ended:
    """Run a command to its end and return how it ended.

    A signal sent to this process is passed on; a second one, or a command that does not end in time, kills
    all that runs. After a failure or a stop no process that the command started is left.

    Args:
        command: the program and its arguments.
        environment: what to set beside this process's own environment.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    received: list[signal.Signals] = []
    previous = {
        number: signal.signal(number, lambda number, _: received.append(signal.Signals(number)))
        for number in _FORWARDED
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        child = subprocess.Popen(command, env={**os.environ, **environment})
        exit_code = _wait(child, received)
        _end_descendants(gently=exit_code == 0 and not received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return Ended(exit_code=exit_code, stopped_by=received[0] if received else None)


def _wait(child: subprocess.Popen[bytes], received: Sequence[signal.Signals]) -> int:
    forward_at = kill_at = None
    while (exit_code := child.poll()) is None:
        time.sleep(_POLL_S)
        now = time.monotonic()
        if received and kill_at is None:
            by_terminal = received[0] is signal.SIGINT and sys.stdin is not None and sys.stdin.isatty()
            forward_at = now + (_TERMINAL_HEAD_START_S if by_terminal else 0.0)
            kill_at = now + _STOP_GRACE_S
        if forward_at is not None and now >= forward_at:
            child.send_signal(received[0])
            forward_at = None
        if kill_at is not None and (now >= kill_at or len(received) > 1):
            for process in _descendants():
                _signal(process, signal.SIGKILL)
    return exit_code


def _end_descendants(*, gently: bool) -> None:
    """Wait for what is left to drain; unless all went well, end what does not."""
    _, alive = psutil.wait_procs(_descendants(), timeout=_DRAIN_S)
    if gently:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in alive:
            _signal(process, number)
        _, alive = psutil.wait_procs(alive, timeout=_DRAIN_S)


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)
