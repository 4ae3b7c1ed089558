"""capture_script: what a script trains, seen by running it up to where its training would begin."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Self

from zerofit.core.capture import Capture, for_plan
from zerofit.core.errors import UserError
from zerofit.core.observer import SILENT, Observer
from zerofit.machine.stopping import stopping_by_exception
from zerofit.machine.this_node import free_host_bytes
from zerofit.models.trace.cache import read_trace, write_trace
from zerofit.scripts.capture.cache import ScriptRun, before_run, load, store, trace_file
from zerofit.scripts.capture.child_process import Child
from zerofit.scripts.capture.errors import INSTEAD, Failure, FailureKind, error_of
from zerofit.scripts.capture.leftovers import CaptureFolder, clear_leftovers, keep
from zerofit.scripts.target import script_words

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from zerofit.core.allocation_log import Trace, TraceRequest
    from zerofit.core.facts import GpuSpec

_COMMAND = (sys.executable, "-m", "zerofit.scripts.capture.child")
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
    observer: Observer = SILENT,
    gpus: tuple[GpuSpec, ...] = (),
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
        observer: is told that the script runs, and what it last printed.
        gpus: of the node that is planned for; the script's own code is told of them.
        instead: what an error says that the user can do in the place of a capture.
        command: what captures; takes a folder and the target.

    Raises:
        UserError: it does not come to a training; the message says why, and which flags do without.
    """
    found = {} if cache_folder is None else clear_leftovers(cache_folder)
    captured = CapturedScript(
        run=ScriptRun(target=target, environment=environment, cwd=cwd, gpus=gpus),
        limit_s=limit_s,
        cache_folder=cache_folder,
        observer=observer,
        instead=instead,
        command=command,
    )
    captured.left = tuple(sentence for sentences in found.values() for sentence in sentences)
    stored = None if cache_folder is None else load(cache_folder, captured.run)
    if stored is not None:
        captured.capture, captured.key, captured.is_kept = *stored, True
    else:
        try:
            captured.start()
        except BaseException:
            captured.close()
            raise
    for folder in found:  # not before: a user who gets an error is not told
        keep(folder)
    return captured


@dataclass(eq=False, kw_only=True)
class CapturedScript:
    """A capture, and the process that holds the model, for as long as this is open."""

    run: ScriptRun
    limit_s: float
    cache_folder: Path | None
    observer: Observer
    instead: str
    command: Sequence[str]
    capture: Capture = field(init=False)
    key: str = field(init=False)
    """Digest of all that decided the capture."""
    is_kept: bool = False
    """True if the capture is from the cache, made by a run of before."""
    left: tuple[str, ...] = ()
    """After close(): sentences on what captures have left, such as folders that hold what nobody noted."""
    _child: Child | None = None
    _folder: CaptureFolder | None = None
    _ended_ns: int | None = None
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def trace(self, request: TraceRequest) -> Trace:
        """Return what a micro-batch of the script's own model allocates and computes.

        Where it is not in the cache, the process that holds the model works it out; for a capture from the
        cache the script is run anew for that.

        Raises:
            UserError: the model can't be traced.
        """
        file = None if self.cache_folder is None else trace_file(self.cache_folder, self.key, request)
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

        A capture from the cache stays what it is; the run then only brings the model to trace.

        Raises:
            UserError: it does not come there, or trains something else than the capture from the cache.
        """
        with self._announced() as tell:
            self._start(tell)

    def _announced(self) -> AbstractContextManager[Callable[[str], None]]:
        """Say that the script runs; return a context whose value takes what it prints meanwhile."""
        script = script_words(self.run.target)
        if self.is_kept:
            why = "what it trains is known from before, and its model is needed once more"
            self.observer.say(f"{script} runs again up to its first step: {why} ...")
            return nullcontext(lambda _: None)
        title = f"looking at what {script} trains, up to its first step"
        return self.observer.task(title, is_announced=True)

    def _start(self, tell: Callable[[str], None]) -> None:
        self._stack.enter_context(stopping_by_exception())
        self._folder = CaptureFolder(self.cache_folder)
        before = before_run(self.run)
        free_bytes = free_host_bytes()
        until = time.monotonic() + self.limit_s
        result = self._attempt("meta", until, tell)
        if isinstance(result, Failure) and _may_need_weights(result, free_bytes):
            self._end_child()
            self._folder.begin_anew(ended_ns=self._ended())
            result = self._attempt("real", until, tell)
        if isinstance(result, Failure):
            assert self._child is not None
            output, weights = self._child.output, self._child.weights
            self.close()
            raise error_of(
                result,
                target=self.run.target,
                output=output,
                weights=weights,
                limit_s=self.limit_s,
                free_bytes=free_bytes,
                instead=self.instead,
            )
        if self.is_kept and _told(result) == _told(self.capture):
            return
        key = store(self.cache_folder, self.run, result, folder=self._folder.path, before=before)
        if self.is_kept:
            raise _trains_another(self.capture, result)
        self.capture, self.key = result, key

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

    def _attempt(self, weights: str, until: float, tell: Callable[[str], None]) -> Capture | Failure:
        assert self._folder is not None
        self._child = Child(self.run, folder=self._folder, weights=weights, command=self.command)
        return self._child.wait(until, tell)


def _may_need_weights(failure: Failure, free_bytes: int) -> bool:
    """Return True if a script may have failed for want of weights, and host memory has room for them."""
    needed = failure.weight_bytes
    if needed is None or needed * _LOADING_TIMES > free_bytes:
        return False
    # Any error that is raised while weights are missing may come of it: a library's own message need not say.
    return failure.kind is FailureKind.NEEDS_VALUES or (failure.kind is FailureKind.RAISED and needed > 0)


def _told(capture: Capture) -> Capture:
    """Return what any two runs of one script that trains the same have in common.

    What may differ is left out: time, memory, seeds, samples drawn at random, and texts such as a folder that
    is named by the hour.
    """
    batches = tuple(
        replace(batch, lengths=(), tensors=tuple(replace(one, shape=()) for one in batch.tensors))
        for batch in capture.batches[:1]
    )
    arguments = {
        name: value
        for name, value in capture.trainer_arguments.items()
        if not isinstance(value, str) and "seed" not in name
    }
    return replace(
        for_plan(capture), batches=batches, lengths=None, notes=(), seed=None, trainer_arguments=arguments
    )


def _trains_another(kept: Capture, seen: Capture) -> UserError:
    was, now = _told(kept), _told(seen)
    differing = [one.name for one in fields(was) if getattr(was, one.name) != getattr(now, one.name)]
    return UserError(
        "script-trains-another",
        "the script does not train the same each time",
        found=f"same arguments and files, but not the same {', '.join(differing).replace('_', ' ')}",
        why="what was said of it is from the run before, and the model at hand from this one",
        fix="give the command again, to go by this run; if it ends so again, let the script take what it "
        "trains from its arguments and files alone",
    )
