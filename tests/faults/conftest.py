"""Faults in real runs: launches in the background that the tests of this folder do something to."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forked_programs import ForkedProgram
from running_launches import RunningLaunch
from runs import ROOT, environment

from zerofit.core.atomic_file import write_whole


@pytest.fixture(scope="session", autouse=True)
def _ops(built_ops: None) -> None:
    """Build DeepSpeed's ops first."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RunningLaunch]]:
    """Begin a launch on two CPU ranks; as forks, where the processes' own start is not what is tested."""
    begun: list[subprocess.Popen[str] | ForkedProgram] = []

    def run(
        *arguments: str, num_ranks: int = 2, engine: str = "native", as_forks: bool = False
    ) -> RunningLaunch:
        command = [sys.executable, "-m", "zerofit", "launch", "--cpu", "--engine", engine]
        command += ["--num-processes", str(num_ranks), *arguments]
        process = _fork(command, tmp_path) if as_forks else _process(command, tmp_path)
        begun.append(process)
        return RunningLaunch(process, tmp_path)

    yield run
    for process in begun:
        process.kill()
        process.wait()


def _process(command: list[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _fork(command: list[str], folder: Path) -> ForkedProgram:
    return ForkedProgram(command, cwd=folder, env=environment())


_MEASURED = Path(ROOT) / "benchmarks" / "measured" / "faults.json"


@pytest.fixture(scope="session")
def note_fault(request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    """Collect what each fault did; `make faults`, which selects no marker, notes it in faults.json."""
    noted: dict[str, object] = {}
    yield lambda name, **fault: noted.update({name: fault})
    if request.config.option.markexpr == "" and noted:
        with open(__file__, encoding="utf-8") as lock:  # pytest's workers share the file
            fcntl.flock(lock, fcntl.LOCK_EX)
            before = json.loads(_MEASURED.read_text()) if _MEASURED.exists() else {}
            write_whole(_MEASURED, json.dumps(dict(sorted({**before, **noted}.items())), indent=1) + "\n")
