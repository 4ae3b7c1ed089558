"""Ends a rank right after the script and its exit handlers, before the C++ libraries take themselves apart.

Threads of gloo and others sometimes abort the process while the interpreter is torn down ("terminate
called without an active exception", SIGABRT), after a training that had ended well.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys


class LastExit:
    """Leaves the process once every other exit handler has run: made first, called last."""

    exit_code = 0
    """What the process ends with."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        atexit.register(self._leave)

    def _leave(self) -> None:
        if os.getpid() != self._pid:  # a child that the script forked ends in its own way
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        ctypes.CDLL(None).fflush(None)  # what C libraries have printed and not yet written
        os._exit(self.exit_code)
