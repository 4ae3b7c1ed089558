"""capture_script: what a script trains, seen by running it up to where its training would begin."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from zerofit.capture import Capture
from zerofit.probe.capture_cache import Run, load, stamps_before, store, trace_file
from zerofit.probe.capture_errors import Failure, Kind, error_of
from zerofit.probe.capture_files import argument_paths
from zerofit.probe.script_child import Child, free_host_bytes
from zerofit.probe.script_leftovers import clear, clear_leftovers, new_folder
from zerofit.probe.script_process import stopping_by_exception
from zerofit.probe.trace.cache import read_trace, write_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from zerofit.allocation_log import Trace, TraceRequest

_COMMAND = (sys.executable, "-m", "zerofit.runtime.capture")
_TRACE_LIMIT_S = 600.0
"""ASSUMPTION: a few layers are traced, which takes seconds."""
_LOADING_TIMES = 2
"""Host memory that loading takes, in sizes of the weights: a checkpoint's beside the model's. ASSUMPTION."""


def capture_script(
    target: tuple[str, ...],
    *,
    environment: Mapping[str, str],
    cwd: Path,
    limit_s: float,
    cache_folder: Path | None,
    on_progress: Callable[[str], None],
    command: Sequence[str] = _COMMAND,
) -> CapturedScript:
    """Run a script up to where its training would begin, and return what it trains; close() is the caller's.

    Nothing is trained and no GPU is used; nothing is saved, uploaded or sent to a tracker. Once the result is
    closed, no process of the script is left, and the user's files are as they were. A capture in the cache is
    returned without running the script.

    Args:
        target: the script or `-m module`, and its arguments.
        environment: the user's variables.
        cwd: where the script runs; absolute.
        limit_s: how long it may take to come to its training.
        cache_folder: zerofit's (see cache_folder.cache_folder); None keeps nothing.
        on_progress: told what the script last printed.
        command: what captures; takes a folder and the target.

    Raises:
        UserError: it does not come to a training; the message says why, and which flags do without.
    """
    if cache_folder is not None:
        clear_leftovers(cache_folder)
    run = Run(target=target, environment=environment, cwd=cwd)
    captured = CapturedScript(
        run, limit_s=limit_s, cache_folder=cache_folder, on_progress=on_progress, command=command
    )
    stored = None if cache_folder is None else load(cache_folder, run)
    if stored is not None:
        captured.capture, captured.key = stored.capture, stored.key
        return captured
    try:
        captured.start()
    except BaseException:
        captured.close()
        raise
    return captured


class CapturedScript:
    """What a script was seen to train, and the process that holds it, for as long as this is open.

    Args: as capture_script has them.
    """

    capture: Capture
    key: str
    """Digest of all that decided the capture."""
    left: tuple[str, ...] = ()
    """After close(): folders that the capture made and that stay, as something nobody noted lies in them."""

    def __init__(
        self,
        run: Run,
        *,
        limit_s: float,
        cache_folder: Path | None,
        on_progress: Callable[[str], None],
        command: Sequence[str],
    ) -> None:
        self._run = run
        self._limit_s = limit_s
        self._cache_folder = cache_folder
        self._on_progress = on_progress
        self._command = command
        self._child: Child | None = None
        self._folder: Path | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def trace(self, request: TraceRequest) -> Trace:
        """Return what a micro-batch of the script's own model allocates and computes.

        Where it is not in the cache, the process that holds the model works it out; for a capture from the
        cache the script is run anew for that.

        Raises:
            UserError: the model can't be traced.
        """
        file = None if self._cache_folder is None else trace_file(self._cache_folder, self.key, request)
        trace = read_trace(file, request) if file else None
        if trace is not None:
            return trace
        if self._child is None:
            self.start()
        assert self._child is not None
        trace = self._child.trace(request, limit_s=_TRACE_LIMIT_S)
        if file:
            write_trace(file, trace)
        return trace

    def start(self) -> None:
        """Run the script to where its training would begin.

        Raises:
            UserError: it does not come there.
        """
        self._stack.enter_context(stopping_by_exception())
        self._folder = new_folder(self._cache_folder)
        before = stamps_before(self._run)
        started_ns = time.time_ns()
        free_bytes = free_host_bytes()
        until = time.monotonic() + self._limit_s
        result = self._attempt("meta", until)
        if isinstance(result, Failure) and result.kind is Kind.NEEDS_VALUES:
            weight_bytes = result.weight_bytes or _weight_bytes(self._run)
            result = replace(result, weight_bytes=weight_bytes)
            if weight_bytes * _LOADING_TIMES <= free_bytes:  # or nobody knows: memory is watched
                result = self._attempt("real", until)
        if isinstance(result, Failure):
            output = "" if self._child is None else self._child.output
            self.close()
            raise error_of(
                result,
                target=self._run.target,
                output=output,
                limit_s=self._limit_s,
                free_bytes=free_bytes,
            )
        self.capture = result
        self.key = store(
            self._cache_folder,
            self._run,
            result,
            folder=self._folder,
            before=before,
            started_ns=started_ns,
        )

    def close(self) -> None:
        """End the script's processes and put the user's files back; safe to do again."""
        child, self._child = self._child, None
        folder, self._folder = self._folder, None
        if child is not None:
            child.end()
        if folder is not None:
            self.left = clear(folder)
        self._stack.close()

    def _attempt(self, weights: str, until: float) -> Capture | Failure:
        assert self._folder is not None
        if self._child is not None:
            self._child.end()
        self._child = Child(self._run, folder=self._folder, weights=weights, command=self._command)
        return self._child.wait(until, self._on_progress)


def _weight_bytes(run: Run) -> int:
    """Return the size of the weights in the largest model folder that an argument names; 0 without one."""
    folders = [path for path in argument_paths(run.target, run.cwd) if path.is_dir()]
    return max((sum(_sizes(folder)) for folder in folders), default=0)


def _sizes(folder: Path) -> Iterator[int]:
    for pattern in ("*.safetensors", "*.bin"):
        yield from (file.stat().st_size for file in folder.glob(pattern) if file.is_file())
