"""The process that copies a rank's output: into its log, and to where it went before.

Usage: python -I -S copy_output.py LOG READER SINK [READER SINK], all of them open descriptors. Only the
standard library is imported: a successor of a killed one starts while the rank trains.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import sys

NAME = "zerofit-log"
"""This process's name, by which the launcher finds it among those of a rank; at most 15 bytes."""
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)
_C = ctypes.CDLL(None)
_PR_SET_NAME = 15
"""linux/prctl.h"""
_CHUNK_BYTES = 65536
"""The capacity of a pipe on Linux (man 7 pipe, "Pipe capacity")."""


def copy_output(sinks: dict[int, int], log_fd: int) -> None:
    """Copy each reader to its sink and to the log until all writers are gone."""
    _C.prctl(_PR_SET_NAME, NAME.encode())
    # A separate session: signals to the rank's process group must not end the copying.
    with contextlib.suppress(PermissionError):  # it leads one already
        os.setsid()
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    selector = selectors.DefaultSelector()
    for reader in sinks:
        selector.register(reader, selectors.EVENT_READ)
    peeked = os.pipe()
    while selector.get_map():
        for key, _ in selector.select():
            chunk, is_left = _peek(key.fd, peeked)
            if not chunk:
                selector.unregister(key.fd)
                continue
            for sink in (sinks[key.fd], log_fd):
                _write_all(sink, chunk)
            if is_left:
                os.read(key.fd, len(chunk))


def _peek(reader: int, pipe: tuple[int, int]) -> tuple[bytes, bool]:
    """Return what can be read, b"" at the end, and True if it is left there until it has been written.

    Were this process killed meanwhile, its successor would write it.
    """
    if (size := _C.tee(reader, pipe[1], _CHUNK_BYTES, 0)) > 0:  # tee(2) copies between pipes
        return os.read(pipe[0], size), True
    with contextlib.suppress(OSError):  # a pseudo-terminal, which ends with EIO
        return os.read(reader, _CHUNK_BYTES), False
    return b"", False


def _write_all(fd: int, chunk: bytes) -> None:
    with contextlib.suppress(OSError):  # the reader is gone, or the disk is full: training continues
        while chunk:
            chunk = chunk[os.write(fd, chunk) :]


if __name__ == "__main__":
    log, *pairs = map(int, sys.argv[1:])
    copy_output(dict(zip(pairs[::2], pairs[1::2], strict=True)), log)
