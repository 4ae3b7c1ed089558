"""Traces that a plan will ask for, made at one time: one by this process, the others by forks of it."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.models.trace.alone import ending, fork
from zerofit.models.trace.entry import cached_at, has_traced, trace_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zerofit.core.allocation_log import TraceRequest
    from zerofit.models.source import ModelSource

_MOST_FORKS = 7
_LIBRARIES = (
    "torch._subclasses.fake_tensor",
    "torch.distributed.tensor",
    "torch._decomp.decompositions",
    "transformers.modeling_utils",
    "zerofit.models.trace.run",
)
"""What every trace imports: forks need not import it again."""


def trace_ahead(
    source: ModelSource,
    requests: Sequence[TraceRequest],
    *,
    cache_folder: Path,
    on_start: Callable[[], None] = lambda: None,
) -> None:
    """Write the traces that a cache lacks, as many at one time as there are cores.

    A request that fails is left out: trace_model then says why. Nothing is done after a trace in this
    process: autograd that has run may fail in forks.

    Args:
        on_start: called before anything is traced.
    """
    missing = [
        request
        for request in dict.fromkeys(requests)
        if request.sharding is None and not cached_at(cache_folder, source, request).exists()
    ]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    processes = min(len(missing), cores, 1 + _MOST_FORKS)
    if processes < 2 or has_traced():
        return
    on_start()
    for name in _LIBRARIES:
        importlib.import_module(name)
    forks: list[int] = []
    try:
        with contextlib.suppress(OSError):  # no more processes are allowed: the rest is traced when asked for
            for first in range(1, processes):
                forks.append(_traced_in_a_fork(source, missing[first::processes], cache_folder))
        _trace(source, missing[::processes], cache_folder)
    except BaseException:  # Ctrl-C: nobody needs the others' traces either
        for number in forks:
            os.kill(number, signal.SIGTERM)
        raise
    finally:
        for number in forks:
            with contextlib.suppress(ChildProcessError):  # a program may ignore SIGCHLD
                os.waitpid(number, 0)


def _trace(source: ModelSource, requests: Sequence[TraceRequest], cache_folder: Path) -> None:
    for request in requests:
        with contextlib.suppress(Exception):
            trace_model(source, request, cache_folder=cache_folder)


def _traced_in_a_fork(source: ModelSource, requests: Sequence[TraceRequest], cache_folder: Path) -> int:
    """Return the number of a fork that writes traces and ends, and prints nothing.

    The thread of a spinner, which is not in the fork, may have held the lock of the terminal.
    """
    if (number := fork()) == 0:
        with ending():
            sys.stdout = sys.stderr = io.StringIO()
            logging.disable()
            _trace(source, requests, cache_folder)
    return number
