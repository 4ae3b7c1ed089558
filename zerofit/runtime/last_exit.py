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
    """Leaves the process once every exit handler that was registered after this one has run.

    Python runs them in reverse order: made before the script starts, this comes after all of the script's.
    Those of what Python loaded even earlier (a sitecustomize, say) do not run.
    """

    exit_code = 1
    """What the process ends with; a failure until somebody knows better."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        atexit.register(self.leave)

    def leave(self) -> None:
        """End the process now, with what it has printed."""
        if os.getpid() != self._pid:  # a child that the script forked ends in its own way
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        ctypes.CDLL(None).fflush(None)  # what C libraries have printed and not yet written
        os._exit(self.exit_code)
