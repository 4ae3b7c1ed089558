"""Uses Landlock to keep a captured script, and all that it starts, from writing where it may not.

Python's audit hooks see neither compiled code nor other programs. A confined thread reads everything, but
creates, writes, removes and renames only in listed folders, and so do its threads and child processes. Calls
whose effect was recorded beforehand are made outside, by threads that are not confined.
See https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import os
import queue
import struct
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

LANDLOCK = "ZEROFIT_LANDLOCK"
"""Environment variable; "0" leaves captures unconfined, as on a kernel without Landlock. For tests."""
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""System calls; the same numbers on all of Linux' architectures."""
_VERSION = 1
_PATH_BENEATH = 1
_NO_NEW_PRIVILEGES = 38
_WRITE_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 13, 1 << 14
"""LANDLOCK_ACCESS_FS_*, and PR_SET_NO_NEW_PRIVS of prctl(2) above (linux/landlock.h, linux/prctl.h)."""
_REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))
"""LANDLOCK_ACCESS_FS_REMOVE_DIR to LANDLOCK_ACCESS_FS_MAKE_SYM."""
_OF_FILES = _WRITE_FILE | _TRUNCATE
_WITH_RENAMES = 2
"""The first version that allows renames from one folder to another (Linux 5.19)."""
_DEVICES = ("/dev", "/proc")


def kernel_version() -> int:
    """Return the version of the kernel's Landlock; 0 if it has none, or LANDLOCK switches it off."""
    if os.environ.get(LANDLOCK) == "0":
        return 0
    return max(0, int(ctypes.CDLL(None).syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)))


class Confinement:
    """Where this process and the programs that it starts may write."""

    def __init__(self, roots: Sequence[str], caches: Sequence[str], allowed: Sequence[str] = ()) -> None:
        """Create the rules.

        Call it before audit hooks are installed: they would record its reads as the script's.

        Args:
            roots: real paths of the user's folders and files.
            caches: real paths of folders that may be written, but for roots inside them.
            allowed: further folders and files that may be written, wherever they are.
        """
        paths = [path for cache in caches for path in _without_roots(cache, roots)]
        self._writable = (*_DEVICES, *paths, *allowed)
        self._version = kernel_version()
        self._ruleset = self._make_ruleset() if self._version else None
        self._calls: queue.SimpleQueue[Callable[[], None]] | None = None
        self._pid = 0
        self._here = threading.local()

    def begin(self) -> None:
        """Confine this thread, and those that it starts, for good; a no-op if the kernel can't."""
        if self._ruleset is None or self._version < _WITH_RENAMES:
            return
        self._calls, self._pid = queue.SimpleQueue(), os.getpid()
        _thread.start_new_thread(_start_threads, (self._calls,))
        self._restrict_thread()
        os.close(self._ruleset)

    @property
    def is_begun(self) -> bool:
        """True if begin() confined this process."""
        return self._calls is not None

    def is_denied(self, path: str) -> bool:
        """Return True if the kernel denies this thread to write a path."""
        if self._calls is None or getattr(self._here, "caller", None) is not None:
            return False
        return not any(f"{path}/".startswith(f"{place.rstrip('/')}/") for place in self._writable)

    def caller(self) -> FrameType:
        """Return the frame for which this thread makes a call outside; this thread's own otherwise."""
        frame: FrameType = getattr(self._here, "caller", None) or sys._getframe(1)
        return frame

    def outside(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function in a thread that is not confined; in a process forked since, it is confined."""
        is_here = self._calls is None or getattr(self._here, "caller", None) is not None
        if self._calls is None or is_here or os.getpid() != self._pid:
            return function(*args, **kwargs)
        outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        frame = sys._getframe(1)

        def call() -> None:
            self._here.caller = frame
            _call_into(outcome, function, *args, **kwargs)

        self._calls.put(call)
        return _result(outcome)

    def inside(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that starts a program, so that the program and its children are confined.

        Landlock restricts a thread permanently: unless this one is confined, the call is made in a new one.
        """
        if self._ruleset is None or self.is_begun:
            return function(*args)
        outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def call() -> Any:
            self._restrict_thread()
            return function(*args)

        thread = threading.Thread(target=_call_into, args=(outcome, call))
        thread.start()
        thread.join()
        return _result(outcome)

    def _restrict_thread(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_NO_NEW_PRIVILEGES, *map(ctypes.c_ulong, (1, 0, 0, 0)))
        if libc.syscall(_RESTRICT_SELF, self._ruleset, 0):
            raise OSError(ctypes.get_errno(), "the kernel does not confine a process")

    def _make_ruleset(self) -> int | None:
        """Return the rules' file descriptor; None if the kernel refuses."""
        handled = _WRITE_FILE | _REMOVE_AND_MAKE
        handled |= (_REFER if self._version >= _WITH_RENAMES else 0) | (_TRUNCATE if self._version > 2 else 0)
        libc = ctypes.CDLL(None)
        attributes = struct.pack("Q", handled)
        ruleset = int(libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0))
        if ruleset < 0:
            return None
        for path in self._writable:
            with contextlib.suppress(OSError):
                place = os.open(path, os.O_PATH | os.O_CLOEXEC)
                access = handled if os.path.isdir(path) else handled & _OF_FILES
                libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", access, place), 0)
                os.close(place)
        return ruleset


def _start_threads(calls: queue.SimpleQueue[Callable[[], None]]) -> None:
    """Make each call in a thread of its own: one that opens a pipe may wait for another."""
    while True:
        _thread.start_new_thread(calls.get(), ())


def _call_into(
    outcome: queue.SimpleQueue[tuple[Any, BaseException | None]],
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> None:
    try:
        outcome.put((function(*args, **kwargs), None))
    except BaseException as error:
        outcome.put((None, error))


def _result(outcome: queue.SimpleQueue[tuple[Any, BaseException | None]]) -> Any:
    result, error = outcome.get()
    if error is not None:
        raise error
    return result


def _without_roots(folder: str, roots: Sequence[str]) -> list[str]:
    """Return a folder, or what is in it beside the user's folders and their parents: rules only allow."""
    inner = [root for root in roots if f"{root}/".startswith(f"{folder.rstrip('/')}/")]
    if not inner:
        return [folder]
    if folder in inner:
        return []
    return [path for entry in _entries(folder) for path in _without_roots(entry, inner)]


def _entries(folder: str) -> list[str]:
    """Return the paths in a folder, without links; none of a folder that can't be read."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return [entry.path for entry in entries if not entry.is_symlink()]
    return []
