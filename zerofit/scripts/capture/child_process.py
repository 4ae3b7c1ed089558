"""The parent's side of a captured process: requests, results and answers."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.core.bounded_read import read_bounded_text
from zerofit.core.capture import Capture, capture_from_json
from zerofit.core.errors import UserError
from zerofit.core.units import GIB
from zerofit.core.validation import parse_known, short_reason
from zerofit.machine.cgroup import count_oom_kills
from zerofit.machine.port import free_port
from zerofit.machine.this_node import free_host_bytes
from zerofit.models.trace.cache import read_trace
from zerofit.scripts.capture import nvidia_smi
from zerofit.scripts.capture.environment import script_environment
from zerofit.scripts.capture.errors import (
    Failure,
    FailureKind,
    error_of,
    killed_by,
    last_lines,
)
from zerofit.scripts.capture.journal import CAPTURE, FAILURE, LOG, REFUSED, SPEC
from zerofit.scripts.capture.leftovers import why_full
from zerofit.scripts.capture.process import end_supervised, supervised_preexec
from zerofit.scripts.capture.restore_files import places

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zerofit.core.allocation_log import Trace, TraceRequest
    from zerofit.scripts.capture.cache import ScriptRun
    from zerofit.scripts.capture.leftovers import CaptureFolder

_POLL_INTERVAL_S = 0.02
_CHECK_INTERVAL_S = 0.2
"""How often output and free memory are checked. ASSUMPTION: faster than readers read and memory fills."""
_MIN_FREE_BYTES = {"meta": GIB // 4, "real": GIB}
"""Free host memory below which a capture is ended, before the OOM killer acts. ASSUMPTION: more if weights
are loaded, which allocates fast."""
_NUM_BATCHES = 8
"""Number of batches whose shapes are recorded. ASSUMPTION: enough to see whether they differ."""
_TAIL_BYTES = 64 << 10
"""Part of the output that is read, at its end."""
_MOST_BYTES = 256 * 1024 * 1024
"""Of a result; a long capture has some MB. ASSUMPTION."""


class Child:
    """A script that runs in its own process up to its training.

    Args:
        run: the script.
        folder: the capture's own.
        weights: "meta" leaves transformers' models without values, "real" loads them and downloads nothing.
        allowed: paths where compiled code and forked processes may write, beside the capture's own folders.
        command: the program that captures; its arguments are the folder and the target.
    """

    ended_ns: int | None = None
    """When end() had ended the last process, as time.time_ns()."""

    def __init__(
        self,
        run: ScriptRun,
        *,
        folder: CaptureFolder,
        weights: str,
        allowed: Sequence[str],
        command: Sequence[str],
    ) -> None:
        self._run = run
        self._folder = folder.path
        self.weights = weights
        self._min_free_bytes = _MIN_FREE_BYTES[weights]
        self._oom_kills = count_oom_kills()
        its_reader, self._writer = os.pipe()
        self._reader, its_writer = os.pipe()
        named = places(
            run.target,
            environment=run.environment,
            cwd=run.cwd,
            home=Path(run.environment.get("HOME") or Path.home()),
        )
        named["caches"].append(str(folder.temporary))
        gpus = [asdict(gpu) for gpu in run.gpus]
        pipes = [its_reader, its_writer]
        asked = {"weights": weights, "num_batches": _NUM_BATCHES, "gpus": gpus, "serve": pipes}
        spec = {**asked, **named, "allowed": [*allowed]}
        for name in (CAPTURE, FAILURE, REFUSED):
            (folder.path / name).unlink(missing_ok=True)
        tools = nvidia_smi.install(folder.path) if gpus else None
        (folder.path / SPEC).write_text(json.dumps(spec), encoding="utf-8")
        (folder.path / "trackers").mkdir(exist_ok=True)
        environment = script_environment(
            run.environment,
            folder=folder.path,
            temporary=folder.temporary,
            port=free_port(0),
            is_offline=weights == "real",
            tools=tools,
        )
        try:
            with (folder.path / LOG).open("wb") as output:
                self._process = subprocess.Popen(
                    (*command, str(folder.path), *run.target),
                    env=environment,
                    cwd=run.cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=pipes,
                    start_new_session=True,
                    preexec_fn=supervised_preexec(folder.lock),
                )
        finally:
            os.close(its_reader)
            os.close(its_writer)

    @property
    def output(self) -> str:
        """The end of the script's output."""
        with (self._folder / LOG).open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
            return log.read().decode("utf-8", errors="replace")

    def wait(self, until: float, tell: Callable[[str], None]) -> Capture | Failure:
        """Return the result of the capture; the process stays alive if it reached its training.

        Args:
            tell: receives the script's last line of output, whenever there is a new one.
        """
        next_check = 0.0
        last: list[str] = []
        while (ended := self._ended()) is None:
            now = time.monotonic()
            if now >= until:
                return Failure(kind=FailureKind.SLOW)
            if now >= next_check:
                next_check = now + _CHECK_INTERVAL_S
                os.utime(self._folder / SPEC)  # records how long this was alive, in case it is killed
                if free_host_bytes() < self._min_free_bytes:
                    return Failure(kind=FailureKind.MEMORY, message="zerofit ended it while memory was short")
                if (lines := last_lines(self.output, 1)) and lines != last:
                    last = lines
                    tell(lines[0])
            time.sleep(_POLL_INTERVAL_S)
        return ended

    def trace(self, request: TraceRequest, *, limit_s: float) -> Trace:
        """Return the trace of the model that the script was about to train.

        Raises:
            UserError: the model can't be traced, its process ended, or the time limit was reached; then
                the process is ended, so that its answer is not mistaken for another one's.
        """
        file = self._folder / "asked.trace"
        asked = json.dumps({"request": asdict(request), "path": str(file)}) + "\n"
        answer = None
        if self.ended_ns is None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._writer, asked.encode())
                answer = self._answer(limit_s)
        if answer and (error := answer.get("error")):
            raise UserError(
                error["id"], error["summary"], found=error["found"], why=error["why"], fix=error["fix"]
            )
        trace = read_trace(file, request) if answer else None
        file.unlink(missing_ok=True)
        if trace is None:
            raise self._untraced(FailureKind.TRACE_ENDED, limit_s)
        return trace

    def _untraced(self, kind: FailureKind, limit_s: float) -> UserError:
        full = why_full(self._folder) if kind is FailureKind.TRACE_ENDED else None
        failure = Failure(kind=FailureKind.NO_ROOM, message=full) if full else Failure(kind=kind)
        return error_of(failure, target=self._run.target, output=self.output, limit_s=limit_s)

    def end(self) -> None:
        """Kill the process and everything it started, and wait until they are gone."""
        if self.ended_ns is not None:
            return
        end_supervised(self._process)
        self.ended_ns = time.time_ns()
        for number in (self._reader, self._writer):
            with contextlib.suppress(OSError):
                os.close(number)

    def _ended(self) -> Capture | Failure | None:
        """Return the result that the process wrote; None while it is running."""
        code = self._process.poll()  # checked before its files, so that none is missed
        for name in (REFUSED, CAPTURE, FAILURE):
            file = self._folder / name
            if not file.exists():
                continue
            try:
                text = read_bounded_text(file, most_bytes=_MOST_BYTES)
                return capture_from_json(text, name=name) if name == CAPTURE else parse_known(Failure, text)
            except (OSError, ValueError, UserError) as error:
                why = error.found if isinstance(error, UserError) else short_reason(error)
                return Failure(kind=FailureKind.EXITED, message=f"its {name} can't be read: {why}")
        if code is None:
            return None
        if code >= 0 and (full := why_full(self._folder)):
            return Failure(kind=FailureKind.NO_ROOM, message=full)
        if code >= 0:
            return Failure(kind=FailureKind.EXITED, message=f"it ended with exit code {code}, by os._exit()")
        now = count_oom_kills()
        is_oom = now is not None and self._oom_kills is not None and now > self._oom_kills
        return killed_by(-code, is_out_of_memory=is_oom)

    def _answer(self, limit_s: float) -> dict[str, dict[str, str]] | None:
        """Return the process's next answer; None if the process has ended."""
        until, line = time.monotonic() + limit_s, b""
        while not line.endswith(b"\n"):
            if time.monotonic() >= until:
                self.end()
                raise self._untraced(FailureKind.TRACE_SLOW, limit_s)
            has_ended = self._process.poll() is not None
            if select.select([self._reader], [], [], 0 if has_ended else _CHECK_INTERVAL_S)[0]:
                part = os.read(self._reader, 1 << 16)
                if not part:
                    return None
                line += part
            elif has_ended:
                return None
        answer: dict[str, dict[str, str]] = json.loads(line)
        return answer
