"""Runs the launch command, forwards signals, and leaves no process behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from zerofit.core.processes import wait_for_end
from zerofit.launching.work import LOG_COPIER, is_stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from types import FrameType

_PR_SET_CHILD_SUBREAPER = 36
"""linux/prctl.h: orphaned grandchildren become our children, so that they can be found and ended."""
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_FOR_RANKS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
"""Signals that the script may handle (such as Slurm's --signal), but that end accelerate's launcher: they are
only sent to the ranks, and stop nothing themselves."""
_POLL_S = 0.05
"""Polling interval. ASSUMPTION: not noticeable, and negligible CPU time."""
_STOP_GRACE_S = 35.0
"""torchrun kills its ranks 30 s after it was told to stop (torch/distributed/elastic); this is slightly
more."""
_SAME_REQUEST_S = 0.5
"""Signals this close together are one request: GNU timeout sends its own twice. ASSUMPTION."""
_DRAIN_S = 3.0
"""Time for processes that copy the ranks' output to write the last lines. ASSUMPTION."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How the command ended."""

    exit_code: int
    """Of the command; negative if a signal killed it."""
    stopped_by: signal.Signals | None
    """The signal sent to this process meanwhile, or None."""


def run_watched(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    report_fd: int | None = None,
    output: Path | None = None,
    stop_grace_s: float = _STOP_GRACE_S,
    is_over: Callable[[int], bool] = lambda _: False,
) -> Ended:
    """Run a command to its end and return how it ended.

    A signal to this process is forwarded to the command once; a second one, or a command that does not end in
    time, kills everything. After a failure or a stop no process that the command started is left; processes
    that this one has started before are not touched.

    The command is a session of its own, as torchrun's ranks are anyway: signals of a terminal to its
    foreground process group (Ctrl-C) reach only this process, which forwards them like those sent by `kill`.
    The command can still read from the terminal.

    Args:
        report_fd: a descriptor for the command alone, which it inherits and this process closes.
        output: file for all output; None for the terminal.
        stop_grace_s: time for the command to end after the first signal.
        is_over: polled with the command's process id; once True, the command is ended as by SIGTERM.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    others = frozenset(_descendants())
    received: list[_Request] = []
    for_ranks: list[int] = []

    def receive(number: int, _: FrameType | None) -> None:
        if number in _FOR_RANKS:
            for_ranks.append(number)
        else:
            received.append(_Request(number))

    previous = {
        number: signal.signal(number, receive)
        for number in (*_FORWARDED, *_FOR_RANKS)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        with contextlib.nullcontext() if output is None else output.open("wb") as file:
            child = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=None if file is None else subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                pass_fds=() if report_fd is None else (report_fd,),
            )
        if report_fd is not None:
            os.close(report_fd)
        exit_code = _wait(child, received, for_ranks, others=others, grace_s=stop_grace_s, is_over=is_over)
        _end_descendants(others, gently=exit_code == 0 and not received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return Ended(exit_code=exit_code, stopped_by=received[0].signal if received else None)


class _Request:
    """A signal, and its time."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        self.at = time.monotonic()


def _wait(
    child: subprocess.Popen[bytes],
    received: Sequence[_Request],
    for_ranks: list[int],
    *,
    others: frozenset[psutil.Process],
    grace_s: float,
    is_over: Callable[[int], bool],
) -> int:
    """Return the command's exit code once it has ended; after a stop, its children get their grace too."""
    kill_at: float | None = None
    killed = False
    ranks: list[psutil.Process] = []
    while (exit_code := child.poll()) is None or (not killed and ranks):
        time.sleep(_POLL_S)
        now = time.monotonic()
        if for_ranks and (listening := _children_of(child)):  # before, there is no rank to receive it
            number = signal.Signals(for_ranks.pop(0))
            for process in listening:
                _signal(process, number)
        if kill_at is None and (received or is_over(child.pid)):
            ranks = _children_of(child)
            child.send_signal(received[0].signal if received else signal.SIGTERM)
            kill_at = now + grace_s
        asked_again = bool(received) and received[-1].at - received[0].at > _SAME_REQUEST_S
        if kill_at is not None and (now >= kill_at or asked_again):
            killed = True
            for process in _descendants(others):
                _signal(process, signal.SIGKILL)
        ranks = wait_for_end(ranks, within_s=0)
    return exit_code


def _children_of(child: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        return psutil.Process(child.pid).children()
    except psutil.NoSuchProcess:
        return []


def _end_descendants(others: frozenset[psutil.Process], *, gently: bool) -> None:
    """Wait for remaining processes to finish their output; after a failure, end those that don't."""
    for process in _descendants(others):
        with contextlib.suppress(psutil.NoSuchProcess):
            if is_stopped(process) and process.name() == LOG_COPIER:
                process.send_signal(signal.SIGCONT)
    alive = wait_for_end(_descendants(others), within_s=_DRAIN_S)
    if gently:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in alive:
            _signal(process, number)
        alive = wait_for_end(alive, within_s=_DRAIN_S)


def _descendants(others: frozenset[psutil.Process] = frozenset()) -> list[psutil.Process]:
    """Return the processes below this one, without those that ran before the command (of a notebook, say)."""
    children = [process for process in psutil.Process().children() if process not in others]
    return [below for process in children for below in (process, *_below(process))]


def _below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)
