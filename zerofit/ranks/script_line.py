"""The line of the user's script that a thread is executing, such as "train.py:83", even inside a library."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_STANDARD_LIBRARY = (sysconfig.get_path("stdlib") + os.sep, "<frozen", "<string>")
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_CODE_CHARACTERS = 90
"""Maximum characters quoted of a line of code. ASSUMPTION: the start matters."""
_ENTRIES = ("<module>", "main")
"""Entry functions of scripts, whose callers are not worth naming."""
_NOWHERE = "an unknown line"


def script_line() -> str:
    """Return the line of the user's script that called this, such as "train.py:83".

    In a function other than main(), the line that called it is appended.
    """
    return _line_of(_script_frames(sys._getframe(1)) or _script_frames(_main_frame()))


def main_thread_line() -> str:
    """Return the main thread's line of the user's script, with its code."""
    frames = _script_frames(_main_frame())
    line = _line_of(frames)
    if not frames:
        return line
    innermost = frames[0]
    code = linecache.getline(innermost.f_code.co_filename, innermost.f_lineno, innermost.f_globals).strip()
    if len(code) > _CODE_CHARACTERS:
        code = f"{code[:_CODE_CHARACTERS].rstrip()} ..."
    return f"{line}: {code}" if code else line


def is_handled_by_main_thread(error: BaseException) -> bool:
    """Return True if the main thread is in an `except` or `finally` block that this error has led to."""
    current: Any = sys._current_exceptions().get(threading.main_thread().ident or 0)
    handled = current[1] if isinstance(current, tuple) else current  # a tuple before Python 3.12
    while handled is not None and handled is not error:
        handled = handled.__context__
    return handled is error


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _script_frames(innermost: FrameType | None) -> list[FrameType]:
    """Return the frames of the user's code, innermost first, including installed scripts and ours."""
    own: list[FrameType] = []
    installed: list[FrameType] = []
    ours: list[FrameType] = []
    while innermost is not None:
        name = innermost.f_code.co_filename
        is_run = innermost.f_globals.get("__name__") == "__main__"
        if name.startswith(_PACKAGE):
            ours += [innermost] if is_run else []
        elif any(part in name for part in _INSTALLED):
            installed += [innermost] if is_run else []
        elif not name.startswith(_STANDARD_LIBRARY):
            own.append(innermost)
        innermost = innermost.f_back
    return own or installed or ours


def _line_of(frames: Sequence[FrameType]) -> str:
    if not frames:
        return _NOWHERE
    line = _place_of(frames[0])
    says_enough = len(frames) == 1 or frames[0].f_code.co_name in _ENTRIES
    return line if says_enough else f"{line} (called at {_place_of(frames[1])})"


def _place_of(frame: FrameType) -> str:
    path = frame.f_code.co_filename
    try:
        relative = os.path.relpath(path)
    except FileNotFoundError:  # the working directory has been removed
        relative = os.pardir
    return f"{path if relative.startswith(os.pardir) else relative}:{frame.f_lineno}"
