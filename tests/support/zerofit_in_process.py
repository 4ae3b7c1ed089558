"""Runs `zerofit ARGS` in this process, as `python -m zerofit ARGS` runs it in one of its own.

A process takes a second to import what this one has imported. All that belongs to a process is set, and put
back: arguments, working folder, variables, paths of modules, standard streams and their descriptors, which
children inherit, and handlers of log lines, warnings and signals. The caches stay: none depends on these.
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NoReturn

import pytest

import zerofit.__main__
from zerofit.cli.main import main
from zerofit.launching import start

_STREAMS = ("stdin", "stdout", "stderr")


def run_in_process(
    arguments: Sequence[str],
    *,
    cwd: Path,
    environment: Mapping[str, str] | None = None,
    stdin: str = "",
    stdout: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Return how a command of zerofit ended, and what it printed.

    Args:
        arguments: the words behind `zerofit`.
        cwd: the folder in which it runs.
        environment: variables beside this process's.
        stdin: the text of its standard input.
        stdout: a descriptor for its output, which is then not returned.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in _STREAMS]
        files[0].write(stdin.encode())
        files[0].seek(0)
        descriptors = [file.fileno() for file in files]
        if stdout is not None:
            descriptors[1] = stdout
        with (
            pytest.MonkeyPatch.context() as patch,
            _descriptors(descriptors),
            _streams(patch),
            _variables(),
            _signal_handlers(),
            _warnings(),
        ):
            _set_process(patch, arguments, cwd, environment or {})
            exit_code = _run()
        return subprocess.CompletedProcess(
            ["zerofit", *arguments], exit_code, stdout=_text(files[1]), stderr=_text(files[2])
        )


def _run() -> int:
    try:
        main()
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        return 1


def _set_process(
    patch: pytest.MonkeyPatch, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str]
) -> None:
    patch.setattr(sys, "argv", [str(zerofit.__main__.__file__), *arguments])
    patch.chdir(cwd)
    os.environ.update({"HF_HUB_OFFLINE": "1", **environment})
    named = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
    patch.setattr(sys, "path", [str(cwd), *named, *sys.path])
    patch.setattr(start, "run_watched", _refuse_ranks)
    # The verb's module is imported once here; what is garbage at the next call would never be collected.
    patch.setattr(gc, "freeze", lambda: None)


def _refuse_ranks(*_: Any, **__: Any) -> NoReturn:
    """Refuse a launch: it makes its process the parent of all orphans below it, and ends them."""
    pytest.fail("this command starts ranks: run it by zerofit_process")


@contextlib.contextmanager
def _descriptors(given: Sequence[int]) -> Iterator[None]:
    """Let the standard descriptors be others."""
    kept = [os.dup(number) for number in range(len(given))]
    try:
        for number, descriptor in enumerate(given):
            os.dup2(descriptor, number)
        yield
    finally:
        for number, descriptor in enumerate(kept):
            os.dup2(descriptor, number)
            os.close(descriptor)


@contextlib.contextmanager
def _streams(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the standard streams be those of a new process, for the handlers of log lines too."""
    made: list[IO[str]] = []
    for number, name in enumerate(_STREAMS):
        raw = io.FileIO(number, "w" if number else "r", closefd=False)
        buffered: Any = io.BufferedWriter(raw) if number else io.BufferedReader(raw)
        errors = "backslashreplace" if name == "stderr" else "strict"
        made.append(
            io.TextIOWrapper(buffered, encoding="utf-8", errors=errors, line_buffering=name == "stderr")
        )
    kept, before = {handler: handler.stream for handler in _log_handlers()}, sys.stderr
    for name, stream in zip(_STREAMS, made, strict=True):
        patch.setattr(sys, name, stream)
        patch.setattr(sys, f"__{name}__", stream)
    patch.setattr(logging.root, "handlers", [])
    for handler in kept:
        handler.stream = made[2]
    try:
        yield
    finally:
        for handler in _log_handlers():
            handler.stream = kept.get(handler, before)
        for stream in made[1:]:
            with contextlib.suppress(OSError):
                stream.flush()


def _log_handlers() -> list[logging.StreamHandler[Any]]:
    """Return the libraries' handlers of log lines that write to standard error, as transformers' own does."""
    loggers = list(logging.root.manager.loggerDict.values())
    handlers = [handler for logger in loggers for handler in getattr(logger, "handlers", ())]
    return [handler for handler in handlers if type(handler) is logging.StreamHandler]


@contextlib.contextmanager
def _variables() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _signal_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not handler and handler is not None:
                signal.signal(number, handler)


@contextlib.contextmanager
def _warnings() -> Iterator[None]:
    """Print warnings on standard error, each once and those of deprecation not, as Python does by default."""
    with warnings.catch_warnings():
        warnings.showwarning = warnings._showwarning_orig  # type: ignore[attr-defined]
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)
        yield


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode().replace("\r\n", "\n")
