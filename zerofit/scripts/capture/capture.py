"""capture_script: runs a script up to where its training would begin, and records what it trains."""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Self

from zerofit.core.capture import Capture, for_plan
from zerofit.core.errors import UserError
from zerofit.core.module_path import OWN_PROGRAM
from zerofit.core.observer import SILENT, Observer
from zerofit.machine.stopping import stopping_by_exception
from zerofit.machine.this_node import free_host_bytes
from zerofit.models.trace.cache import kept_trace
from zerofit.scripts.capture.cache import ScriptRun, load, stamp_inputs, store, trace_file
from zerofit.scripts.capture.child_process import Child
from zerofit.scripts.capture.errors import INSTEAD, Failure, FailureKind, error_of, with_limit
from zerofit.scripts.capture.leftovers import CaptureFolder, clear_leftovers, keep
from zerofit.scripts.target import script_words

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from zerofit.core.allocation_log import Trace, TraceRequest
    from zerofit.core.facts import GpuSpec

_COMMAND = (*OWN_PROGRAM, "zerofit.scripts.capture.child")
_MAX_ALLOWED = 4
"""How often a script is started again with another path that it may write. ASSUMPTION: few libraries write
by themselves, each in one folder."""
_TRACE_LIMIT_S = 600.0
"""ASSUMPTION: only a few layers are traced, which takes seconds."""
_LOADING_FACTOR = 2
"""Host memory for loading, as a multiple of the weights: the checkpoint and the model. ASSUMPTION."""


def capture_script(
    target: tuple[str, ...],
    *,
    environment: Mapping[str, str],
    cwd: Path,
    limit_s: float,
    cache_folder: Path | None,
    observer: Observer = SILENT,
    gpus: tuple[GpuSpec, ...] = (),
    own_folders: tuple[Path, ...] = (),
    instead: str = INSTEAD,
    retry: Callable[[float], str] = with_limit,
    command: Sequence[str] = _COMMAND,
) -> CapturedScript:
    """Run a script up to where its training would begin, and return what it trains; the caller must close it.

    Call it from the main thread: the script is killed when the thread that started it ends.

    Nothing is trained and no GPU is used; nothing is saved, uploaded or sent to a tracker. After close(), no
    process of the script is left, and the user's files are restored. A cached capture is returned without
    running the script.

    Args:
        target: the script or `-m module`, and its arguments.
        environment: the user's environment variables.
        cwd: the script's working folder; absolute.
        limit_s: time limit for reaching the training.
        cache_folder: zerofit's (see cache_folder.cache_folder); None disables the cache.
        observer: reports that the script runs, and its last line of output.
        gpus: of the planned node; the script's own code sees them.
        own_folders: outputs of the run itself; changes in them don't invalidate a cached capture.
        instead: alternatives to a capture, for error messages.
        retry: returns what to type for a longer time limit.
        command: the program that captures; its arguments are a folder and the target.

    Raises:
        UserError: the training was not reached; the message says why, and which flags avoid the capture.
    """
    found = {} if cache_folder is None else clear_leftovers(cache_folder)
    captured = CapturedScript(
        run=ScriptRun(target=target, environment=environment, cwd=cwd, gpus=gpus),
        limit_s=limit_s,
        cache_folder=cache_folder,
        observer=observer,
        instead=instead,
        retry=retry,
        command=command,
    )
    captured.left = tuple(sentence for sentences in found.values() for sentence in sentences)
    stored = None if cache_folder is None else load(cache_folder, captured.run, own_folders)
    if stored is not None:
        captured.capture, captured.key, captured.is_cached = *stored, True
    else:
        try:
            captured.start()
        except BaseException:
            captured.close()
            raise
    for folder in found:  # only now: after an error they are reported next time
        keep(folder)
    return captured


@dataclass(eq=False, kw_only=True)
class CapturedScript:
    """A capture, and the process that holds the model while this is open."""

    run: ScriptRun
    limit_s: float
    cache_folder: Path | None
    observer: Observer
    instead: str
    retry: Callable[[float], str]
    command: Sequence[str]
    capture: Capture = field(init=False)
    key: str = field(init=False)
    """Digest of the capture's inputs."""
    is_cached: bool = False
    """True if the capture is from the cache."""
    left: tuple[str, ...] = ()
    """After close(): sentences on what captures left behind, such as folders with unrecorded files."""
    _child: Child | None = None
    _folder: CaptureFolder | None = None
    _allowed: tuple[str, ...] = ()
    """Paths where the script may write unseen, as it was denied before."""
    _ended_ns: int | None = None
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def trace(self, request: TraceRequest, on_progress: Callable[[str], None] = lambda _: None) -> Trace:
        """Return the allocations and computation of a micro-batch of the script's own model.

        If it is not cached, the process that holds the model computes it; for a cached capture the script
        runs again.

        Args:
            on_progress: told what runs, if it is not cached.

        Raises:
            UserError: the model can't be traced.
        """

        def make() -> Trace:
            on_progress("the script's own model")
            if self._child is None:
                self.start()
            assert self._child is not None
            return self._child.trace(request, limit_s=_TRACE_LIMIT_S)

        file = None if self.cache_folder is None else trace_file(self.cache_folder, self.key, request)
        return kept_trace(file, request, make)

    def start(self) -> None:
        """Run the script up to where its training would begin.

        A cached capture is kept; the run then only provides the model to trace.

        Raises:
            UserError: training was not reached, or differs from that of the cached capture.
        """
        with self._announced() as tell:
            self._start(tell)

    def _announced(self) -> AbstractContextManager[Callable[[str], None]]:
        """Announce that the script runs; return a context manager whose value receives its output."""
        script = script_words(self.run.target)
        if self.is_cached:
            why = "its capture is cached, but its model is needed again"
            self.observer.say(f"{script} runs again up to its first step: {why} ...")
            return nullcontext(lambda _: None)
        title = f"capturing what {script} trains, up to its first step"
        return self.observer.task(title, is_announced=True)

    def _start(self, tell: Callable[[str], None]) -> None:
        self._stack.enter_context(stopping_by_exception())
        self._folder = CaptureFolder(self.cache_folder)
        before = stamp_inputs(self.run)
        free_bytes = free_host_bytes()
        started = time.monotonic()
        until = started + self.limit_s
        result = self._attempt("meta", until, tell)
        if isinstance(result, Failure) and _may_need_weights(result, free_bytes):
            self._end_child()
            self._folder.reset(ended_ns=self._ended())
            result = self._attempt("real", until, tell)
        if isinstance(result, Failure):
            assert self._child is not None
            output, weights, elapsed_s = self._child.output, self._child.weights, time.monotonic() - started
            self.close()
            raise error_of(
                result,
                target=self.run.target,
                output=output,
                weights=weights,
                limit_s=self.limit_s,
                free_bytes=free_bytes,
                elapsed_s=elapsed_s,
                instead=self.instead,
                retry=self.retry,
            )
        if self.is_cached and _reproducible(result) == _reproducible(self.capture):
            return
        key = store(self.cache_folder, self.run, result, folder=self._folder.path, before=before)
        if self.is_cached:
            raise _differs_from_cached(self.capture, result)
        self.capture, self.key = result, key

    def close(self) -> None:
        """End the script's processes and restore the user's files; may be called repeatedly."""
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

    def _attempt(self, weights: str, until: float, tell: Callable[[str], None]) -> Capture | Failure:
        assert self._folder is not None
        while True:
            self._child = Child(
                self.run, folder=self._folder, weights=weights, allowed=self._allowed, command=self.command
            )
            result = self._child.wait(until, tell)
            if not isinstance(result, Failure) or result.kind is not FailureKind.CONFINED:
                return result
            if len(self._allowed) >= _MAX_ALLOWED:
                return result
            self._allowed += (_next_allowed(result.path, self._allowed),)
            self._end_child()
            self._folder.reset(ended_ns=self._ended())


def _next_allowed(path: str, allowed: tuple[str, ...]) -> str:
    """Return the path to allow: the folder of the one that was denied if it is the second in that folder."""
    folder = os.path.dirname(path)
    return folder if any(os.path.dirname(known) == folder for known in allowed) else path


def _may_need_weights(failure: Failure, free_bytes: int) -> bool:
    """Return True if a script may have failed for lack of weights, and these fit in host memory."""
    needed = failure.weight_bytes
    if needed is None or needed * _LOADING_FACTOR > free_bytes:
        return False
    # Any error raised while weights are missing may be a consequence: a library's message need not say so.
    return failure.kind is FailureKind.NEEDS_VALUES or (failure.kind is FailureKind.RAISED and needed > 0)


def _reproducible(capture: Capture) -> Capture:
    """Return the part of a capture that is equal for any two runs of the same training.

    Left out are time, memory, seeds, randomly drawn samples, and strings such as folders named by time.
    """
    batches = tuple(
        replace(batch, lengths=(), tensors=tuple(replace(tensor, shape=()) for tensor in batch.tensors))
        for batch in capture.batches[:1]
    )
    arguments = {
        name: value
        for name, value in capture.trainer_arguments.items()
        if not isinstance(value, str) and "seed" not in name
    }
    evaluation = capture.evaluation and replace(capture.evaluation, batches=(), lengths=None)
    return replace(
        for_plan(capture),
        batches=batches,
        lengths=None,
        evaluation=evaluation,
        notes=(),
        seed=None,
        trainer_arguments=arguments,
    )


def _differs_from_cached(kept: Capture, seen: Capture) -> UserError:
    was, now = _reproducible(kept), _reproducible(seen)
    differing = [
        member.name for member in fields(was) if getattr(was, member.name) != getattr(now, member.name)
    ]
    return UserError(
        "script-trains-another",
        "the script trains differently each time",
        found=f"same arguments and files, but not the same {', '.join(differing).replace('_', ' ')}",
        why="the capture is from the previous run, but the model from this one",
        fix="run the command again, to use this run; if it fails again, make the script's training depend "
        "only on its arguments and files",
    )
