"""Starts trials, each in a separate process, and collects their outcomes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from measuring.results import TrialOutcome, TrialState, spec_to_json
from zerofit.core.validation import parse_strictly
from zerofit.machine.cgroup import count_oom_kills
from zerofit.machine.stopping import stopping_by_exception

if TYPE_CHECKING:
    from measuring.results import TrialSpec

STAGE = "zerofit trial: "
"""Prefix of log lines with the process's current stage."""
_PROGRAM = ("-m", "measuring.trial_program")
_BENCHMARKS = Path(__file__).parents[1]
_LOG_TAIL_BYTES = 64 * 1024
"""ASSUMPTION: contains the last stage of a log."""
_END_LIMIT_S = 10.0
"""ASSUMPTION: a killed process releases its memory within this time, unless it is stuck in a driver."""
_NOT_INHERITED = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_MODULE_LOADING"),
    }
)
"""Variables that a trial does not inherit, beside ACCELERATE_*: those of launchers, and those that change the
memory of torch's allocator or the CUDA context, since the prediction is for their defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFiles:
    """The files of one trial's process."""

    folder: Path
    name: str
    """Unique in the folder."""

    @property
    def log(self) -> Path:
        """All output of the process."""
        return self.folder / f"{self.name}.log"

    @property
    def spec(self) -> Path:
        """The process's task."""
        return self.folder / f"{self.name}.spec.json"

    @property
    def result(self) -> Path:
        """The process's outcome."""
        return self.folder / f"{self.name}.json"


class RunningTrial:
    """The process of one trial, from start_trial() to its end.

    Before finish() a process whose spec has `waits` only imports, so that several can be started ahead while
    another one runs. Leaving the context ends the process.
    """

    def __init__(self, process: subprocess.Popen[bytes], files: TrialFiles) -> None:
        self._process = process
        self._files = files
        self._num_kills_before = count_oom_kills()
        self._has_ended = False

    def finish(self, *, limit_s: float) -> TrialOutcome:
        """Let the process run, wait for its end, and return its outcome.

        Args:
            limit_s: the process is killed after this time, or on Ctrl-C.
        """
        log = self._files.log
        with stopping_by_exception():
            try:
                self._write_to_stdin(b"go\n")
                code = self._process.wait(timeout=limit_s)
            except subprocess.TimeoutExpired:
                reason = f"not done after {limit_s:g} s, {_stage(log)}"
                return TrialOutcome(state=TrialState.TOO_SLOW, reason=reason)
            except KeyboardInterrupt:
                log.unlink()  # there is no failure to explain
                raise
            finally:
                self.end()
        return self._outcome(code)

    def end(self) -> None:
        """Kill the process and its children, such as compilers of torch.compile.

        A process that is stuck in a driver can't be killed: it is left behind with a message on stderr.
        """
        if self._has_ended:  # by now another process may have its number
            return
        self._has_ended = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(timeout=_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            left = f"process {self._process.pid} of {self._files.name}"
            why = f"it was killed but did not end within {_END_LIMIT_S:g} s"
            print(f"zerofit: {left} is left behind: {why}", file=sys.stderr, flush=True)
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # unread input
                self._process.stdin.close()

    def __enter__(self) -> RunningTrial:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _write_to_stdin(self, line: bytes) -> None:
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # it ended by itself, and its log has the reason
                self._process.stdin.write(line)
                self._process.stdin.flush()

    def _outcome(self, code: int) -> TrialOutcome:
        log, result = self._files.log, self._files.result
        if code == 0 and result.exists():
            return parse_strictly(TrialOutcome, result.read_text(encoding="utf-8"))
        if code < 0:
            before, now = self._num_kills_before, count_oom_kills()
            by_kernel = code == -signal.SIGKILL and before is not None and now is not None and now > before
            why = "; the kernel's OOM killer ended a process" if by_kernel else ""
            reason = f"ended by {signal.Signals(-code).name}, {_stage(log)}{why}"
            return TrialOutcome(state=TrialState.KILLED, reason=reason)
        last_line = (_lines(log) or ["it printed nothing"])[-1]
        reason = f"its process ended with {code}: {last_line}"
        return TrialOutcome(state=TrialState.FAILED, reason=reason)


def start_trial(spec: TrialSpec, files: TrialFiles, *, program: tuple[str, ...] = _PROGRAM) -> RunningTrial:
    """Start the process of a trial; with `waits` in the spec, it imports and then waits for finish().

    It ends with this process, and with the thread that calls this.

    Args:
        spec: its task.
        files: the paths of its files; an earlier trial's result there is removed.
        program: Python's arguments; other programs than the default must call trial_program.main(), too.
    """
    files.result.unlink(missing_ok=True)
    files.spec.write_text(spec_to_json(spec), encoding="utf-8")
    with files.log.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *program, str(files.spec), str(files.result), str(os.getpid())],
            stdin=subprocess.PIPE if spec.waits else subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=trial_environment(on_cpu=spec.on_cpu),
            start_new_session=True,
        )
    return RunningTrial(process, files)


def run_trial(spec: TrialSpec, files: TrialFiles, *, limit_s: float) -> TrialOutcome:
    """Run a trial from start to end and return its outcome.

    Args:
        spec: its task.
        files: the paths of its files.
        limit_s: when to kill it.
    """
    with stopping_by_exception(), start_trial(spec, files) as trial:
        return trial.finish(limit_s=limit_s)


def trial_environment(*, on_cpu: bool) -> dict[str, str]:
    """Return the environment of a trial: offline, torch's and CUDA's defaults, no GPUs on the CPU.

    The process finds the zerofit and the benchmarks of this checkout, installed or not.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _NOT_INHERITED and not name.startswith("ACCELERATE_")
    }
    environment["HF_HUB_OFFLINE"] = "1"
    places = (str(_BENCHMARKS), str(_BENCHMARKS.parent), environment.get("PYTHONPATH"))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    if on_cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
        environment["DS_ACCELERATOR"] = "cpu"  # deepspeed/accelerator/real_accelerator.py
    return environment


def _lines(log: Path) -> list[str]:
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _LOG_TAIL_BYTES))
        return [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]


def _stage(log: Path) -> str:
    """Return the process's last stage: "while taking step 2 of 5"."""
    stages = [line.removeprefix(STAGE) for line in _lines(log) if line.startswith(STAGE)]
    return f"while {stages[-1]}" if stages else "while importing"
