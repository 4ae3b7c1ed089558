"""A thread in each rank that counts its collectives, and replaces the process that copies its output."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

from zerofit.core.upstream.torch import count_collectives
from zerofit.training.changes import tell
from zerofit.training.reporting import observe

if TYPE_CHECKING:
    from zerofit.training.reporting.tee import LogCopier

_EVERY_S = 1.0
"""ASSUMPTION: short beside any limit, and what a rank prints meanwhile mostly fits into a pipe (64 KiB)."""


def start(copier: LogCopier, rank: int) -> None:
    """Start the thread. It gets no signal: a script's handlers run in the main thread."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    threading.Thread(target=_guard, args=(copier, rank), name="zerofit-guard", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _guard(copier: LogCopier, rank: int) -> None:
    pid, counted = os.getpid(), 0
    while os.getpid() == pid:
        time.sleep(_EVERY_S)
        if copier.keep():
            tell(f"zerofit: the process that copied the output of rank {rank} was killed; another goes on")
        if (collectives := count_collectives()) != counted:
            counted = collectives
            observe.note_collectives(counted)
