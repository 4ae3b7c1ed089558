"""Copies everything a rank prints, by whatever library, into its log while it streams on."""

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
"""As much as a pipe holds on Linux (man 7 pipe, "Pipe capacity")."""
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)


def tee_output(log: Path) -> None:
    """Send this process's standard output and error on as before, and into a log as well.

    Works on file descriptors, so that what C++ libraries and child processes print is in the log too. A
    process of its own does the copying: it outlives a rank that is killed, and writes its last words. A
    terminal stays a terminal for the script.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sources = {}
    for target in (1, 2):
        reader, writer = _channel(target)
        sources[reader] = (os.dup(target), writer, target)
    # A signal to the process group must not end the copying before it ignores them.
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
    if os.fork() == 0:
        try:
            for _, writer, target in sources.values():
                os.close(writer)
                os.close(target)
            _copy({reader: sink for reader, (sink, _, _) in sources.items()}, log_fd)
        finally:
            os._exit(0)  # whatever happens, the script runs in one process only
    signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    for reader, (sink, writer, target) in sources.items():
        os.dup2(writer, target)
        for fd in (reader, sink, writer):
            os.close(fd)
    os.close(log_fd)


def _channel(target: int) -> tuple[int, int]:
    """Return (reader, writer): a pseudo-terminal where the target is a terminal, else a pipe."""
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
    """Copy each reader to its sink and to the log until all writers have gone."""
    # A session of its own: what is sent to the rank's process group must not end the copying.
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
    with contextlib.suppress(OSError):  # the reader has gone, or the disk is full: training goes on
        while chunk:
            chunk = chunk[os.write(fd, chunk) :]
