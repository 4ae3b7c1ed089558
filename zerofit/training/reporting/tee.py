"""Copies all output of a rank, by whatever library, into its log while passing it on."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import tty
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_CHUNK_BYTES = 65536
"""The capacity of a pipe on Linux (man 7 pipe, "Pipe capacity")."""
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)


def tee_output(log: Path) -> None:
    """Pass on this process's standard output and error as before, and also write them to a log.

    Works on file descriptors, so that output of C++ libraries and child processes is included. A separate
    process
    copies: it outlives a killed rank, and writes its last output. A terminal stays a terminal for the script.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sources = {}
    for target in (1, 2):
        reader, writer = _channel(target)
        sources[reader] = (os.dup(target), writer, target)
    # A signal to the process group must not end the copying process before it ignores them.
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
    if os.fork() == 0:
        try:
            for _, writer, target in sources.values():
                os.close(writer)
                os.close(target)
            _copy({reader: sink for reader, (sink, _, _) in sources.items()}, log_fd)
        finally:
            os._exit(0)  # in any case, the script runs in one process only
    signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    for reader, (sink, writer, target) in sources.items():
        os.dup2(writer, target)
        for fd in (reader, sink, writer):
            os.close(fd)
    os.close(log_fd)


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


def _copy(sinks: dict[int, int], log_fd: int) -> None:
    """Copy each reader to its sink and to the log until all writers are gone."""
    # A separate session: signals to the rank's process group must not end the copying.
    os.setsid()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    selector = selectors.DefaultSelector()
    for reader in sinks:
        selector.register(reader, selectors.EVENT_READ)
    while selector.get_map():
        for key, _ in selector.select():
            chunk = b""
            with contextlib.suppress(OSError):  # a pseudo-terminal ends with EIO
                chunk = os.read(key.fd, _CHUNK_BYTES)
            if not chunk:
                selector.unregister(key.fd)
                continue
            for sink in (sinks[key.fd], log_fd):
                _write_all(sink, chunk)


def _write_all(fd: int, chunk: bytes) -> None:
    with contextlib.suppress(OSError):  # the reader is gone, or the disk is full: training continues
        while chunk:
            chunk = chunk[os.write(fd, chunk) :]
