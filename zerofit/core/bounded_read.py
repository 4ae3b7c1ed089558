"""Reading a file that anyone may have put there: never without end, and never waiting for long."""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from io import BufferedReader
    from pathlib import Path

_BLOCK_BYTES = 1 << 20
PIPE_LIMIT_S = 60.0
"""How long a pipe's writer may be silent: `--plan <(zerofit plan ...)`. ASSUMPTION."""


def read_bounded(
    path: str | Path, *, most_bytes: int, cuts: bool = False, limit_s: float = PIPE_LIMIT_S
) -> bytes:
    """Return a file's bytes.

    Args:
        path: of a regular file, or of a pipe such as that of `<(command)`.
        most_bytes: the largest size.
        cuts: True to leave out what follows, in place of an error.
        limit_s: how long to wait for a pipe.

    Raises:
        OSError: it can't be read, is larger, is a device or another special file, or a pipe whose writer is
            silent; the reason is in `strerror`.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe without a writer blocks
    try:
        state = os.fstat(descriptor)
        if stat.S_ISDIR(state.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not (stat.S_ISREG(state.st_mode) or stat.S_ISFIFO(state.st_mode) or _is_null(state)):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        data = _first_bytes(descriptor, str(path), most_bytes + 1, limit_s=limit_s)
    finally:
        os.close(descriptor)
    if len(data) > most_bytes and not cuts:
        raise OSError(errno.EFBIG, f"File too large: over {most_bytes} bytes", str(path))
    return data[:most_bytes]


def open_regular(path: str | Path) -> BufferedReader:
    """Open a regular file to read it in parts.

    Raises:
        OSError: it can't be opened, or is a folder, a pipe or a device.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return open(descriptor, "rb")


def open_stream(path: str | Path) -> BufferedReader:
    """Open a file, a pipe or a terminal to read it to its end.

    Raises:
        OSError: it can't be opened, or is a device that has no end.
    """
    file = open(path, "rb")  # noqa: SIM115 - the caller closes it
    state = os.fstat(file.fileno())
    if stat.S_ISBLK(state.st_mode) or (
        stat.S_ISCHR(state.st_mode) and not (_is_null(state) or file.isatty())
    ):
        file.close()
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return file


def _is_null(state: os.stat_result) -> bool:
    return stat.S_ISCHR(state.st_mode) and state.st_rdev == os.stat(os.devnull).st_rdev


def read_bounded_text(path: str | Path, *, most_bytes: int, encoding: str = "utf-8") -> str:
    """Return a file's text, with line ends as open() gives them.

    Raises:
        OSError: as for `read_bounded`.
        UnicodeDecodeError: it is no text, a ValueError.
    """
    text = read_bounded(path, most_bytes=most_bytes).decode(encoding)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _first_bytes(descriptor: int, path: str, num_bytes: int, *, limit_s: float) -> bytes:
    blocks: list[bytes] = []
    until = time.monotonic() + limit_s
    while num_bytes > 0:
        try:
            block = os.read(descriptor, min(num_bytes, _BLOCK_BYTES))
        except BlockingIOError:
            left_s = max(0.0, until - time.monotonic())
            if not select.select([descriptor], [], [], left_s)[0]:
                said = f"Nothing was written to it in {limit_s:.0f} s"
                raise TimeoutError(errno.ETIMEDOUT, said, path) from None
            continue
        if not block:
            break
        blocks.append(block)
        num_bytes -= len(block)
    return b"".join(blocks)
