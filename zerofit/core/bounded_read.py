"""Reading a file that anyone may have put there: never without end, and never waiting for long."""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_BLOCK = 1 << 20
PIPE_LIMIT_S = 60.0
"""How long a pipe's writer may be silent: `--plan <(zerofit plan ...)`. ASSUMPTION."""


def read_bounded(path: str | Path, *, most_bytes: int, limit_s: float = PIPE_LIMIT_S) -> bytes:
    """Return a file's bytes.

    Args:
        path: of a regular file, or of a pipe such as that of `<(command)`.
        most_bytes: the largest size.
        limit_s: how long to wait for a pipe.

    Raises:
        OSError: it can't be read, is larger, is a device or another special file, or a pipe whose writer is
            silent; the reason is in `strerror`.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe without a writer blocks
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        is_null = stat.S_ISCHR(mode) and os.fstat(descriptor).st_rdev == os.stat(os.devnull).st_rdev
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or is_null):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        return _all_of(descriptor, str(path), most_bytes=most_bytes, limit_s=limit_s)
    finally:
        os.close(descriptor)


def read_bounded_text(path: str | Path, *, most_bytes: int, encoding: str = "utf-8") -> str:
    """Return a file's text, with line ends as open() gives them.

    Raises:
        OSError: as for `read_bounded`.
        UnicodeDecodeError: it is no text, a ValueError.
    """
    text = read_bounded(path, most_bytes=most_bytes).decode(encoding)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _all_of(descriptor: int, path: str, *, most_bytes: int, limit_s: float) -> bytes:
    blocks: list[bytes] = []
    left, until = most_bytes + 1, time.monotonic() + limit_s
    while left > 0:
        try:
            block = os.read(descriptor, min(left, _BLOCK))
        except BlockingIOError:
            if not select.select([descriptor], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError(
                    errno.ETIMEDOUT, f"Nothing was written to it in {limit_s:.0f} s", path
                ) from None
            continue
        if not block:
            return b"".join(blocks)
        blocks.append(block)
        left -= len(block)
    raise OSError(errno.EFBIG, f"File too large: over {most_bytes} bytes", path)
