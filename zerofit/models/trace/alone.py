"""Traces of FSDP2, each in a process of its own.

After a run of FSDP2 on fake tensors the process's heap may be corrupt (torch 2.13: a garbage collection ends
in a segmentation fault), so that no process makes two of them, and none collects. A process that has imported
the libraries, and traces nothing itself, forks for each. Without collections a trace of Llama-3-8B takes a
quarter less time and no more memory.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.module_path import OWN_PROGRAM
from zerofit.core.processes import end_with_parent
from zerofit.models.trace.cache import read_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import IO

    from zerofit.core.allocation_log import Trace, TraceRequest
    from zerofit.models.source import ModelSource

_PROGRAM = "zerofit.models.trace.alone_process"
_ATTEMPTS = 2
_FIELDS = ("summary", "found", "why", "fix")


def trace_alone(source: ModelSource, request: TraceRequest) -> Trace:
    """Return the trace of a named model, made by another process.

    Raises:
        UserError: the model can't be traced.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "asked.trace"
        asked = base64.b64encode(pickle.dumps((source, request))).decode()
        answer = _process().answer(json.dumps({"asked": asked, "path": str(file)}))
        if (error := answer.get("error")) is not None:
            raise UserError(error.pop("id"), error.pop("summary"), **error)
        trace = read_trace(file, request)
    if trace is None:
        raise untraced(f"nothing was written to {folder}")
    return trace


def serve_forks(answer: Callable[[str], dict[str, Any]], reader: IO[str], writer: IO[str]) -> None:
    """Answer each request line by one line, each in a fork of this process, up to the end of the file."""
    for line in reader:
        writer.write(json.dumps(_in_a_fork(answer, line)) + "\n")
        writer.flush()


def error_of(error: UserError) -> dict[str, Any]:
    """Return the answer that says an error."""
    return {"error": {"id": error.rule, **{name: getattr(error, name) for name in _FIELDS}}}


def _in_a_fork(answer: Callable[[str], dict[str, Any]], line: str) -> dict[str, Any]:
    """Return the answer of a fork; of a second one if the first dies."""
    owner = os.getpid()
    for _ in range(_ATTEMPTS):
        reader, writer = os.pipe()
        if (number := fork()) == 0:
            end_with_parent(owner)  # nobody else ends a trace whose plan was killed
            os.close(reader)
            with ending():
                gc.disable()  # a collection of FSDP2's cycles may end in a segmentation fault
                os.write(writer, (json.dumps(answer(line)) + "\n").encode())
        os.close(writer)
        with open(reader, encoding="utf-8") as told:
            said = told.readline()
        status = 0
        with contextlib.suppress(ChildProcessError):  # a script may ignore SIGCHLD
            status = os.waitpid(number, 0)[1]
        if said.endswith("\n"):
            found: dict[str, Any] = json.loads(said)
            return found
    return error_of(untraced(_how_ended(os.waitstatus_to_exitcode(status))))


def fork() -> int:
    """Fork this process, without a warning of its threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # on threads, none of which is waited for
        return os.fork()


def _let_go_but(kept: set[int]) -> None:
    """Let all other files go, so that whoever reads their other ends sees them end.

    They are not closed: an object of the script that does so later would close another file of that number.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/dev/fd")):
        if number not in kept:
            with contextlib.suppress(OSError):  # the listing's own
                os.fstat(number)
                os.dup2(null, number)


@contextmanager
def ending() -> Iterator[None]:
    """Run in one thread, and end this process afterwards, without the interpreter's last collection."""
    code = 1
    try:
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(1)  # the threads of a pool are not in the fork
        yield
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def untraced(found: str) -> UserError:
    """Return the error of a model whose trace failed."""
    return UserError(
        "trace-failed",
        "the model can't be traced under FSDP2",
        found=found,
        why="what FSDP2 allocates is known by running it on tensors without values",
        fix="plan with ZeRO: --engine deepspeed",
    )


def _how_ended(code: int) -> str:
    return f"the tracing process ended {f'by {signal.Signals(-code).name}' if code < 0 else f'with {code}'}"


class Forks:
    """A fork of this process that answers each request line in a fork of its own.

    Begin it before this process runs a backward pass: where autograd then has threads for a GPU, it fails in
    forks.
    """

    def __init__(self, answer: Callable[[str], dict[str, Any]]) -> None:
        (reader, to_fork), (from_fork, writer) = os.pipe(), os.pipe()
        self._fork = fork()
        if self._fork == 0:
            _let_go_but({0, 1, 2, reader, writer})
            with (
                ending(),
                open(reader, encoding="utf-8") as asked,
                open(writer, "w", encoding="utf-8") as told,
            ):
                serve_forks(answer, asked, told)
        os.close(reader)
        os.close(writer)
        self._writer = open(to_fork, "w", encoding="utf-8")  # noqa: SIM115 - open as long as the fork
        self._reader = open(from_fork, encoding="utf-8")  # noqa: SIM115

    def answer(self, line: str) -> dict[str, Any]:
        """Return the answer to a request line."""
        return _asked(self._writer, self._reader, line) or error_of(untraced("the tracing process has ended"))

    def close(self) -> None:
        """End the fork, which reads to the end of its input."""
        with contextlib.suppress(BrokenPipeError):
            self._writer.close()
        self._reader.close()
        with contextlib.suppress(ChildProcessError):  # a script may ignore SIGCHLD
            os.waitpid(self._fork, 0)


class _Process:
    """A process that imports the libraries and answers each request line in a fork; it ends with this one."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        package = str(Path(__file__).parents[3])
        paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        self._messages = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [*OWN_PROGRAM, _PROGRAM, str(self._owner)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._messages,
            env={**os.environ, "PYTHONPATH": paths},
            text=True,
            start_new_session=True,  # an interrupt is for this process, which ends it with its forks
        )
        atexit.register(self._end)

    @property
    def is_here(self) -> bool:
        """True if it answers this process, rather than one that this one is a fork of."""
        return self._owner == os.getpid() and self._process.poll() is None

    def answer(self, line: str) -> dict[str, Any]:
        """Return the answer to a request line."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if (answer := _asked(self._process.stdin, self._process.stdout, line)) is not None:
            return answer
        ended = _how_ended(self._process.wait())
        self._messages.seek(0)
        lines = self._messages.read().strip().splitlines() or ["no message"]
        return error_of(untraced(f"{ended}: {lines[-1][:200]}"))

    def _end(self) -> None:
        if self.is_here:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _asked(writer: IO[str], reader: IO[str], line: str) -> dict[str, Any] | None:
    """Return the answer to a request line; None if nobody answers."""
    with contextlib.suppress(BrokenPipeError):
        writer.write(line.rstrip("\n") + "\n")
        writer.flush()
    said = reader.readline()
    if not said.endswith("\n"):
        return None
    answer: dict[str, Any] = json.loads(said)
    return answer


_started: list[_Process] = []


def _process() -> _Process:
    if not _started or not _started[-1].is_here:
        _started[:] = [_Process()]
    return _started[-1]
