"""Wraps Python's functions that change files: they are called outside of the confinement, once recorded.

What their audit events leave out is added: the folder of os.open(), and pipes that are made.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.machinery
import io
import os
import sys
from typing import TYPE_CHECKING, Any

from zerofit.scripts.on_import import around

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerofit.scripts.capture.child.confinement import Confinement

WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
WILL_MAKE = "zerofit/make"
"""The audit event of a file that is about to be made or written, by its path, where Python has none."""
_CHANGING = ("link", "mkdir", "remove", "rename", "replace", "rmdir", "symlink", "truncate", "unlink")
"""Functions of os whose audit events say all."""
_PIPES = ("mkfifo", "mknod")
"""Functions of os without audit events."""


def wrap_file_calls(confinement: Confinement, *, is_guarding: Callable[[], bool]) -> None:
    """Replace open() and os's functions by ones that make the call outside of the confinement.

    Args:
        confinement: of this process.
        is_guarding: returns True while this thread handles an audit event, whose own files need no wrapper.
    """

    def plainly(original: Any, *args: Any, **kwargs: Any) -> Any:
        return confinement.outside(original, *args, **kwargs)

    def open_file(original: Any, file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
        reads = isinstance(file, int) or not isinstance(mode, str) or not set("wax+") & set(mode)
        if reads or is_guarding() or kwargs.get("opener") or len(args) > 5:
            return original(file, mode, *args, **kwargs)
        return confinement.outside(original, file, mode, *args, **kwargs)

    def os_open(original: Any, path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
        folder = kwargs.pop("dir_fd", None)
        if folder is not None:  # which the event would leave out
            path = os.path.join(f"/proc/self/fd/{folder}", os.fsdecode(path))
        if is_guarding() or not flags & WRITE_FLAGS:
            return original(path, flags, *args, **kwargs)
        return confinement.outside(original, path, flags, *args, **kwargs)

    def make_pipe(original: Any, path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
        named = os.fsdecode(path)
        if dir_fd is not None:
            named = os.path.join(f"/proc/self/fd/{dir_fd}", named)
        return confinement.outside(_report_and_call, named, original, path, *args, dir_fd=dir_fd, **kwargs)

    _Call.put(builtins, "open", open_file)
    io.open = builtins.open
    _Call.put(os, "open", os_open)
    for name in _CHANGING:
        _Call.put(os, name, plainly)
    for name in _PIPES:
        _Call.put(os, name, make_pipe)
    around(importlib.machinery.SourceFileLoader, "set_data")(plainly)  # writes bytecode by its own os.open()


def _report_and_call(named: str, original: Any, *args: Any, **kwargs: Any) -> Any:
    sys.audit(WILL_MAKE, named)
    return original(*args, **kwargs)


class _Call:
    """A function in place of a built-in one, which unlike a Python function is no method in a class."""

    def __init__(self, original: Any, function: Callable[..., Any], place: tuple[str, str]) -> None:
        functools.update_wrapper(self, original)
        self._original, self._function, self._place = original, function, place

    @classmethod
    def put(cls, module: Any, name: str, function: Callable[..., Any]) -> None:
        """Replace a module's function by one that gets it as first argument."""
        original = getattr(module, name)
        call = cls(original, function, (module.__name__, name))
        for capable in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if original in capable:
                capable.add(call)
        setattr(module, name, call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._original, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _at, self._place


def _at(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
