"""capture_script: what a script trains, seen by running it up to where its training would begin."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from zerofit.capture import Capture
from zerofit.probe.capture_cache import Run, before_run, load, store, trace_file
from zerofit.probe.capture_errors import INSTEAD, Failure, Kind, error_of
from zerofit.probe.capture_files import argument_paths
from zerofit.probe.script_child import Child, free_host_bytes
from zerofit.probe.script_leftovers import CaptureFolder, clear_leftovers, keep
from zerofit.probe.script_process import stopping_by_exception
from zerofit.probe.trace.cache import read_trace, write_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from zerofit.allocation_log import Trace, TraceRequest

_COMMAND = (sys.executable, "-m", "zerofit.runtime.capture")
_TRACE_LIMIT_S = 600.0
"""ASSUMPTION: a few layers are traced, which takes seconds."""
_WEIGHTS = (
    ("model.safetensors", "model-*-of-*.safetensors"),
    ("pytorch_model.bin", "pytorch_model-*-of-*.bin"),
    ("*.safetensors",),
    ("*.bin",),
)
"""Names of files of weights, first those that are loaded first (transformers/modeling_utils.py,
_get_resolved_checkpoint_files)."""
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
    instead: str = INSTEAD,
    command: Sequence[str] = _COMMAND,
) -> CapturedScript:
    """Run a script up to where its training would begin, and return what it trains; close() is the caller's.

    It is for the main thread: the script is killed when the thread that started it ends.

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
        instead: what an error says that the user can do in the place of a capture.
        command: what captures; takes a folder and the target.

    Raises:
        UserError: it does not come to a training; the message says why, and which flags do without.
    """
    found = {} if cache_folder is None else clear_leftovers(cache_folder)
    run = Run(target=target, environment=environment, cwd=cwd)
    captured = CapturedScript(
        run,
        limit_s=limit_s,
        cache_folder=cache_folder,
        on_progress=on_progress,
        instead=instead,
        command=command,
    )
    captured.left = tuple(sentence for sentences in found.values() for sentence in sentences)
    stored = None if cache_folder is None else load(cache_folder, run)
    if stored is not None:
        captured.capture, captured.key = stored.capture, stored.key
    else:
        try:
            captured.start()
        except BaseException:
            captured.close()
            raise
    for folder in found:  # not before: a user who gets an error is not told
        keep(folder)
    return captured


class CapturedScript:
    """What a script was seen to train, and the process that holds it, for as long as this is open.

    Args: as capture_script has them.
    """

    capture: Capture
    key: str
    """Digest of all that decided the capture."""
    left: tuple[str, ...] = ()
    """After close(): sentences on what captures have left, such as folders that hold what nobody noted."""

    def __init__(
        self,
        run: Run,
        *,
        limit_s: float,
        cache_folder: Path | None,
        on_progress: Callable[[str], None],
        instead: str,
        command: Sequence[str],
    ) -> None:
        self._run = run
        self._limit_s = limit_s
        self._cache_folder = cache_folder
        self._on_progress = on_progress
        self._instead = instead
        self._command = command
        self._child: Child | None = None
        self._folder: CaptureFolder | None = None
        self._ended_ns: int | None = None
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
        self._folder = CaptureFolder(self._cache_folder)
        before = before_run(self._run)
        free_bytes = free_host_bytes()
        until = time.monotonic() + self._limit_s
        result = self._attempt("meta", until)
        if isinstance(result, Failure) and result.kind is Kind.NEEDS_VALUES:
            weight_bytes = result.weight_bytes
            if weight_bytes is None:
                weight_bytes = _weight_bytes(self._run)
            result = replace(result, weight_bytes=weight_bytes)
            if weight_bytes is not None and weight_bytes * _LOADING_TIMES <= free_bytes:
                self._end_child()
                self._folder.begin_anew(ended_ns=self._ended())
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
                instead=self._instead,
            )
        self.capture = result
        self.key = store(
            self._cache_folder,
            self._run,
            result,
            folder=self._folder.path,
            before=before,
        )

    def close(self) -> None:
        """End the script's processes and put the user's files back; safe to do again."""
        self._end_child()
        folder, self._folder = self._folder, None
        if folder is not None:
            self.left += folder.clear(ended_ns=self._ended())
        self._stack.close()

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()
            self._ended_ns = child.ended_ns

    def _ended(self) -> int:
        return self._ended_ns or time.time_ns()

    def _attempt(self, weights: str, until: float) -> Capture | Failure:
        assert self._folder is not None
        self._child = Child(self._run, folder=self._folder, weights=weights, command=self._command)
        return self._child.wait(until, self._on_progress)


def _weight_bytes(run: Run) -> int | None:
    """Return the size of the weights in the model folders that arguments name; None without one."""
    named = {path.resolve() for path in argument_paths(run.target, run.cwd) if path.is_dir()}
    return sum(_bytes_in(folder) for folder in named) or None


def _bytes_in(folder: Path) -> int:
    """Return the size of the weights of one model, of which a folder may hold copies in several formats."""
    for patterns in _WEIGHTS:
        files = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
        if files:
            return sum(file.stat().st_size for file in files)
    return 0
