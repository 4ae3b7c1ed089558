"""Runs the rungs one after another, each in a fresh process, and collects how they ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.machine.cgroup import count_oom_kills
from zerofit.machine.stopping import stopping_by_exception
from zerofit.measuring.results import Outcome, RungState
from zerofit.measuring.run import STAGE
from zerofit.measuring.spec import spec_to_json

if TYPE_CHECKING:
    from zerofit.measuring.spec import Spec

PROGRAM = ("-m", "zerofit.measuring.run")
"""What Python runs: the process of a rung."""
_LAST_BYTES = 64 * 1024
"""ASSUMPTION: the last stage stands within so much of a log's end."""
_END_LIMIT_S = 10.0
"""ASSUMPTION: a killed process gives its memory back within that; longer it is stuck in a driver."""

_LEFT_OUT = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "CUDA_MODULE_LOADING",
    }
)
"""Of the environment, beside ACCELERATE_*: what a launcher says, and what changes the memory that torch's
allocator and the CUDA context take, as the prediction is for their defaults."""


class InterruptedRungError(Exception):
    """The user pressed Ctrl-C while a rung ran; its process has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one rung's process leaves its files."""

    folder: Path
    name: str
    """Of the files: the rung's number and name."""

    @property
    def log(self) -> Path:
        """All that the process prints."""
        return self.folder / f"{self.name}.log"

    @property
    def spec(self) -> Path:
        """What it is told."""
        return self.folder / f"{self.name}.spec.json"

    @property
    def result(self) -> Path:
        """How it ended, as the process itself says."""
        return self.folder / f"{self.name}.json"


class RunningRung:
    """The process of one rung, from its start to its end; start_rung() makes it.

    Until finish() it has only imported, where its spec says that it waits: several such may be there while
    another one runs. Leaving a `with` of it ends it.
    """

    def __init__(self, process: subprocess.Popen[bytes], spec: Spec, place: Place) -> None:
        self._process = process
        self._spec = spec
        self._place = place
        self._had_kills = count_oom_kills()
        self._has_ended = False

    def finish(self, *, limit_s: float) -> Outcome:
        """Tell the process to go, wait for its end, and return how it ended.

        Args:
            limit_s: so many seconds from now on it is ended.

        Raises:
            InterruptedRungError: Ctrl-C, after which the process is ended.
        """
        log = self._place.log
        with stopping_by_exception():
            try:
                self._go()
                code = self._process.wait(timeout=limit_s)
            except subprocess.TimeoutExpired:
                reason = f"not done after {limit_s:g} s, {_stage(log)}"
                return Outcome(state=RungState.TOO_SLOW, reason=reason)
            except KeyboardInterrupt:
                log.unlink()  # nothing failed that it could explain
                raise InterruptedRungError from None
            finally:
                self.end()
        return _outcome(self._spec, code, log, had_kills=self._had_kills)

    def end(self) -> None:
        """End the process, whatever it does, and those that it started: torch.compile starts some.

        One that is stuck in a driver can't be ended: after some seconds it is left behind, as stderr is told.
        """
        if self._has_ended:  # by now another may have its number
            return
        self._has_ended = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(timeout=_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            left = f"process {self._process.pid} of {self._place.name}"
            why = f"it was killed and did not end within {_END_LIMIT_S:g} s"
            print(f"zerofit: {left} is left behind: {why}", file=sys.stderr, flush=True)
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # what it never read
                self._process.stdin.close()

    def __enter__(self) -> RunningRung:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _go(self) -> None:
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # it ended by itself, and says why
                self._process.stdin.write(b"go\n")
                self._process.stdin.flush()


def start_rung(spec: Spec, place: Place, *, program: tuple[str, ...] = PROGRAM) -> RunningRung:
    """Start the process of a rung: it imports, and where the spec says so it then waits for finish().

    It ends when this process does, and when the thread that calls this does.

    Args:
        spec: the rung; its result_file must not be there yet.
        place: where the process's files go.
        program: what Python runs; any other goes through zerofit.measuring.run.main(), too.
    """
    place.spec.write_text(spec_to_json(spec), encoding="utf-8")
    with place.log.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *program, str(place.spec), str(os.getpid())],
            stdin=subprocess.PIPE if spec.waits else subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=rung_environment(on_cpu=spec.on_cpu),
            start_new_session=True,
        )
    return RunningRung(process, spec, place)


def run_rung(spec: Spec, place: Place, *, limit_s: float) -> Outcome:
    """Run one rung in a process of its own and return how it ended.

    Args:
        spec: the rung; its result_file must not be there yet.
        place: where the process's files go.
        limit_s: after so many seconds it is ended.

    Raises:
        InterruptedRungError: Ctrl-C, after which the process is ended.
    """
    with stopping_by_exception(), start_rung(spec, place) as rung:
        return rung.finish(limit_s=limit_s)


def rung_environment(*, on_cpu: bool) -> dict[str, str]:
    """Return the environment of a rung: offline, with torch's and CUDA's defaults, on the CPU no GPUs."""
    kept = {name: value for name, value in os.environ.items() if not _is_left_out(name)}
    environment = {**kept, "HF_HUB_OFFLINE": "1"}
    if on_cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
        environment["DS_ACCELERATOR"] = "cpu"  # deepspeed/accelerator/real_accelerator.py
    return environment


def _outcome(spec: Spec, code: int, log: Path, *, had_kills: int | None) -> Outcome:
    from pydantic import TypeAdapter

    result = Path(spec.result_file)
    if code == 0 and result.exists():
        outcome: Outcome = TypeAdapter(Outcome).validate_json(result.read_text(encoding="utf-8"))
        return outcome
    if code < 0:
        name = signal.Signals(-code).name
        now = count_oom_kills()
        by_kernel = code == -signal.SIGKILL and had_kills is not None and now is not None and now > had_kills
        why = "; the kernel ended a process for want of memory" if by_kernel else ""
        reason = f"ended by {name}, {_stage(log)}{why}"
        return Outcome(state=RungState.KILLED, reason=reason)
    return Outcome(state=RungState.FAILED, reason=f"its process ended with {code}: {_last_line(log)}")


def _is_left_out(name: str) -> bool:
    return name in _LEFT_OUT or name.startswith("ACCELERATE_")


def _lines(log: Path) -> list[str]:
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _LAST_BYTES))
        return [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]


def _stage(log: Path) -> str:
    """Return what the process did last: "while taking step 2 of 5"."""
    stages = [line.removeprefix(STAGE) for line in _lines(log) if line.startswith(STAGE)]
    return f"while {stages[-1]}" if stages else "while importing"


def _last_line(log: Path) -> str:
    return (_lines(log) or ["it printed nothing"])[-1]
