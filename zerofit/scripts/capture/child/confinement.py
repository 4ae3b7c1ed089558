"""Uses Landlock to keep programs that a captured script starts from losing the user's files.

Python's audit hooks don't reach into other programs. A confined one may create empty files and folders
anywhere, but only write, remove and rename files outside of the user's folders, or in a cache inside them.
Without Landlock nothing is confined. See https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""System calls; the same numbers on all of Linux' architectures."""
_VERSION = 1
_PATH_BENEATH = 1
_NO_NEW_PRIVILEGES = 38
_WRITE_FILE, _REMOVE_FOLDER, _REMOVE_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 4, 1 << 5, 1 << 13, 1 << 14
"""LANDLOCK_ACCESS_FS_*, and PR_SET_NO_NEW_PRIVS of prctl(2) above (linux/landlock.h, linux/prctl.h)."""
_OF_FILES = _WRITE_FILE | _TRUNCATE


def kernel_version() -> int:
    """Return the version of the kernel's Landlock; 0 if it has none."""
    return max(0, int(ctypes.CDLL(None).syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)))


class Confinement:
    """The rules on what programs may write."""

    def __init__(self, roots: Sequence[str], caches: Sequence[str]) -> None:
        """Create the rules.

        Call it before audit hooks are installed: they would record its reads as the script's.

        Args:
            roots: real paths of the user's folders and files.
            caches: real paths of folders where programs may write, possibly inside the user's.
        """
        self._roots, self._caches = roots, caches
        self._ruleset = self._make_ruleset()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that starts a program, so that the program and its children are confined.

        Landlock restricts a thread permanently, so the function is called in a new one.
        """
        if self._ruleset is None:
            return function(*args)
        outcome: list[Any] = []

        def run() -> None:
            try:
                self._restrict_thread()
                outcome.append((function(*args), None))
            except BaseException as error:
                outcome.append((None, error))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        ((result, error),) = outcome
        if error is not None:
            raise error
        return result

    def _restrict_thread(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_NO_NEW_PRIVILEGES, *map(ctypes.c_ulong, (1, 0, 0, 0)))
        if libc.syscall(_RESTRICT_SELF, self._ruleset, 0):
            raise OSError(ctypes.get_errno(), "the kernel does not confine a program")

    def _make_ruleset(self) -> int | None:
        """Return the rules' file descriptor; None if the kernel has no Landlock."""
        version = kernel_version()
        if not version:
            return None
        handled = _WRITE_FILE | _REMOVE_FOLDER | _REMOVE_FILE
        handled |= (_REFER if version > 1 else 0) | (_TRUNCATE if version > 2 else 0)
        libc = ctypes.CDLL(None)
        attributes = struct.pack("Q", handled)
        ruleset = int(libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0))
        if ruleset < 0:
            return None
        for path in self._allowed_paths():
            with contextlib.suppress(OSError):
                place = os.open(path, os.O_PATH | os.O_CLOEXEC)
                access = handled if os.path.isdir(path) else handled & _OF_FILES
                rule = struct.pack("=Qi", access, place)
                libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
                os.close(place)
        return ruleset

    def _allowed_paths(self) -> list[str]:
        """Return the caches, and the siblings of the user's folders and their parents: rules only allow."""
        way = {"/"}
        for root in self._roots:
            while (root := os.path.dirname(root)) not in way:
                way.add(root)
        passed = [
            folder
            for folder in way
            if not any(f"{folder}/".startswith(f"{root.rstrip('/')}/") for root in self._roots)
        ]
        beside = [path for folder in passed for path in _entries(folder)]
        return [path for path in (*self._caches, *beside) if path not in way and path not in self._roots]


def _entries(folder: str) -> list[str]:
    """Return the paths in a folder, without links; none of a folder that can't be read."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return [entry.path for entry in entries if not entry.is_symlink()]
    return []
