"""Copies all output of a rank, by whatever library, into its log while passing it on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import tty
from typing import TYPE_CHECKING

from zerofit.core.own_file import OwnDescriptor
from zerofit.training.reporting import copy_output

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


class LogCopier:
    """The process that copies this rank's output, and the descriptors that a successor of it needs.

    The rank keeps the ends that the process reads: if it is killed, what is printed waits for a successor,
    and no write fails.
    """

    def __init__(
        self, pid: int, log: OwnDescriptor, pipes: Sequence[tuple[OwnDescriptor, OwnDescriptor]]
    ) -> None:
        self._log, self._pipes = log, tuple(pipes)
        self._pid: int | None = pid
        self._has_ended = False
        self._lock = threading.Lock()
        self._owner = os.getpid()

    @property
    def is_gone(self) -> bool:
        """True if the process was killed, and no successor could be started."""
        return self._pid is None

    def wait(self) -> bool:
        """Wait until the process ends; return False if it has ended because nobody can print any more."""
        with contextlib.suppress(ChildProcessError):  # the script has reaped it
            if self._pid is not None and not self._has_ended:
                os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
        return not self._has_ended

    def keep(self, tell: Callable[[], None]) -> None:
        """Start a successor if the process has been killed, and tell so.

        Returns once the successor runs and it has been told, by whichever thread: the successor copies what
        this process has printed, even if this process ends.
        """
        if os.getpid() != self._owner:  # a child that the script has forked
            return
        with self._lock:
            if self._was_killed() and self._start_successor():
                tell()

    def _start_successor(self) -> bool:
        descriptors = [self._log, *(end for pipe in self._pipes for end in pipe)]
        if not all(descriptor.is_own() for descriptor in descriptors):  # the script has closed them
            self._has_ended = True
            return False
        numbers = [descriptor.number for descriptor in descriptors]
        self._pid = None
        with contextlib.suppress(OSError):  # no memory, or too many processes: tried again
            successor = subprocess.Popen(
                [sys.executable, "-I", "-S", copy_output.__file__, *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # as a writer of the rank's pipes it would never end
                stderr=subprocess.DEVNULL,
                pass_fds=numbers,
                start_new_session=True,
            )
            self._pid = successor.pid
            successor.returncode = 0  # waited for here: Popen calls it a success if the script reaps it
        return self._pid is not None

    def _was_killed(self) -> bool:
        """Return True if the process ended before all writers were gone."""
        if self._pid is None or self._has_ended:
            return not self._has_ended
        try:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
        except ChildProcessError:  # the script has reaped it
            return True
        self._has_ended = pid != 0 and status == 0
        return status != 0  # 0 also while it runs


def tee_output(log: Path) -> LogCopier:
    """Pass on this process's standard output and error as before, and also write them to a log.

    Works on file descriptors, so that output of C++ libraries and child processes is included. A separate
    process copies: it outlives a killed rank, and writes its last output. A terminal stays a terminal for the
    script.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sources = {}
    for target in (1, 2):
        reader, writer = _channel(target)
        sources[reader] = (os.dup(target), writer, target)
    # A signal to the process group must not end the copying process before it ignores them.
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, copy_output.IGNORED)
    pid = os.fork()
    if pid == 0:
        try:
            for _, writer, target in sources.values():
                os.close(writer)
                os.close(target)
            copy_output.copy_output({reader: sink for reader, (sink, _, _) in sources.items()}, log_fd)
        finally:
            os._exit(0)  # in any case, the script runs in one process only
    signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    for writer, target in ((writer, target) for _, writer, target in sources.values()):
        os.dup2(writer, target)
        os.close(writer)
    pipes = [(OwnDescriptor(reader), OwnDescriptor(sink)) for reader, (sink, _, _) in sources.items()]
    return LogCopier(pid, OwnDescriptor(log_fd), pipes)


def _channel(target: int) -> tuple[int, int]:
    """Return (reader, writer): a pseudo-terminal if the target is a terminal, else a pipe."""
    if not os.isatty(target):
        return os.pipe()
    reader, writer = os.openpty()
    tty.setraw(writer)
    with contextlib.suppress(OSError):
        import fcntl
        import termios

        size = fcntl.ioctl(target, termios.TIOCGWINSZ, bytes(8))
        fcntl.ioctl(writer, termios.TIOCSWINSZ, size)
    return reader, writer
