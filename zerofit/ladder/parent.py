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

from zerofit.ladder.run import STAGE
from zerofit.ladder.spec import spec_to_json
from zerofit.ladder_results import Outcome, RungState
from zerofit.probe.oom_kills import count_oom_kills
from zerofit.probe.script_process import stopping_by_exception

if TYPE_CHECKING:
    from zerofit.ladder.spec import Spec

MODULE = "zerofit.ladder.run"
_LAST_BYTES = 64 * 1024
"""ASSUMPTION: the last stage stands within so much of a log's end."""


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


def run_rung(spec: Spec, place: Place, *, limit_s: float) -> Outcome:
    """Run one rung in a process of its own and return how it ended.

    Args:
        spec: the rung; its result_file must not be there yet.
        place: where the process's files go.
        limit_s: after so many seconds it is ended.

    Raises:
        InterruptedRungError: Ctrl-C, after which the process is ended.
    """
    place.spec.write_text(spec_to_json(spec), encoding="utf-8")
    kills = count_oom_kills()
    with place.log.open("wb") as log, stopping_by_exception():
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(place.spec), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(spec),
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            reason = f"not done after {limit_s:g} s, {_stage(place.log)}"
            return Outcome(state=RungState.TOO_SLOW, reason=reason)
        except KeyboardInterrupt:
            place.log.unlink()  # nothing failed that it could explain
            raise InterruptedRungError from None
        finally:
            _end(process)
    return _outcome(spec, code, place.log, had_kills=kills)


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


def _environment(spec: Spec) -> dict[str, str]:
    """Return the environment of a rung: offline, and on the CPU without GPUs."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    if spec.on_cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started: torch.compile starts some."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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
