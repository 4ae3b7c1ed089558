"""Faults in real runs: launches in the background that the tests of this folder do something to."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from running_launches import RunningLaunch
from runs import environment


@pytest.fixture(scope="session", autouse=True)
def _ops(built_ops: None) -> None:
    """Build DeepSpeed's ops first."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RunningLaunch]]:
    """Begin a launch on two CPU ranks."""
    begun: list[subprocess.Popen[str]] = []

    def run(*arguments: str, num_ranks: int = 2, engine: str = "native") -> RunningLaunch:
        command = [sys.executable, "-m", "zerofit", "launch", "--cpu", "--engine", engine]
        process = subprocess.Popen(
            [*command, "--num-processes", str(num_ranks), *arguments],
            cwd=tmp_path,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        begun.append(process)
        return RunningLaunch(process, tmp_path)

    yield run
    for process in begun:
        process.kill()
        process.wait()
