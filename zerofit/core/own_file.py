"""Descriptors of zerofit's own in the process of a script, which may close any number and reuse it."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

_LOWEST = 500
"""Above what scripts close that close "all" descriptors (256, as daemons did), and below the usual limit of
1,024 open files (getrlimit(2))."""


class OwnDescriptor:
    """A descriptor that is used only while it is still the file that it was opened for."""

    def __init__(self, number: int) -> None:
        """Move an open descriptor to a high number, where the limit of open files allows it."""
        try:
            self.number = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _LOWEST)
        except OSError:
            self.number = number
            os.set_inheritable(number, False)
        else:
            os.close(number)
        self._identity = identity_of(self.number)

    def is_own(self) -> bool:
        """Return False if the script has closed it; another file may have its number by now."""
        return identity_of(self.number) == self._identity

    def check(self) -> None:
        """Check that it is still its own.

        Raises:
            OSError: the script has closed it.
        """
        if identity_of(self.number) != self._identity:
            raise OSError(errno.EBADF, "the script has closed zerofit's descriptor")

    def close(self) -> None:
        """Close it, unless the script has."""
        if self.is_own():
            os.close(self.number)


class OwnFile:
    """A file that is written now and then for as long as the process lives.

    It is opened again if the script has closed its descriptor, but not if another file has its name by then.
    """

    def __init__(self, path: Path) -> None:
        self._path = os.path.abspath(path)  # the script may change its folder
        self._descriptor = OwnDescriptor(self._open(os.O_CREAT | os.O_TRUNC))
        self._identity = identity_of(self._descriptor.number)
        self.number = self._descriptor.number
        """The descriptor's number, which changes when it is opened again."""

    def _open(self, flags: int) -> int:
        return os.open(self._path, os.O_WRONLY | flags, 0o600)

    def write_at(self, offset: int, data: bytes) -> None:
        """Write bytes at an offset.

        Raises:
            OSError: the disk is full, or the file is gone.
        """
        try:
            found = os.fstat(self.number)  # 2 us beside 3 for packing and writing (measured)
            is_own = (found.st_dev, found.st_ino) == self._identity
        except OSError:
            is_own = False
        if not is_own:
            self.reopen()
        os.pwrite(self.number, data, offset)

    def reopen(self) -> bool:
        """Open the file again if the script has closed it, and return True if it had.

        Raises:
            OSError: the file is gone, or another has its name.
        """
        if self._descriptor.is_own():
            return False
        number = self._open(0)
        if identity_of(number) != self._identity:
            os.close(number)
            raise OSError(errno.ESTALE, "another file has its name", self._path)
        self._descriptor = OwnDescriptor(number)
        self.number = self._descriptor.number
        return True


def identity_of(place: int | str | Path) -> tuple[int, int] | None:
    """Return device and inode of a descriptor or path; None if nothing is open or has that name there."""
    try:
        found = os.stat(place)
    except OSError:
        return None
    return found.st_dev, found.st_ino
