"""Threads in each rank that count its collectives, and replace the process that copies its output."""

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
"""ASSUMPTION: short beside any limit."""


def start(copier: LogCopier, rank: int) -> None:
    """Start the threads. They get no signal: a script's handlers run in the main thread."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    threading.Thread(target=_count, name="zerofit-guard", daemon=True).start()
    threading.Thread(target=_keep_copying, args=(copier, rank), name="zerofit-log-guard", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def keep(copier: LogCopier, rank: int) -> None:
    """Replace the process that copies the output of this rank if it has been killed, and say so."""
    killed = f"zerofit: the process that copied the output of rank {rank} was killed; another goes on"
    copier.keep(lambda: tell(killed))


def _keep_copying(copier: LogCopier, rank: int) -> None:
    while copier.wait():
        keep(copier, rank)
        time.sleep(_EVERY_S if copier.is_gone else 0)


def _count() -> None:
    pid, counted = os.getpid(), 0
    while os.getpid() == pid:
        time.sleep(_EVERY_S)
        if (collectives := count_collectives()) != counted:
            counted = collectives
            observe.note_collectives(counted)
