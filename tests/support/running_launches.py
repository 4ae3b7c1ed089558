"""A launch in the background, and the moment at which something is done to it."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from forked_programs import ForkedProgram

from zerofit.core.processes import wait_for_end
from zerofit.core.rank_observation import RankObservation, read_observation

TRAIN = str(Path(__file__).parents[1] / "faults" / "scripts" / "train.py")
PATIENCE_S = 120
"""Two ranks begin within 20 s of two idle cores."""


@dataclass(frozen=True, slots=True)
class RunningLaunch:
    """A launch that still runs."""

    process: subprocess.Popen[str] | ForkedProgram
    folder: Path

    @property
    def run_folder(self) -> Path:
        """The one run folder."""
        (found,) = (self.folder / "zerofit-runs").glob("2*")
        return found

    def observation(self, rank: int) -> RankObservation | None:
        """Return what a rank does; None before it has begun."""
        return read_observation(next((self.folder / "zerofit-runs").glob("2*/ranks"), Path("/")), rank)

    def wait_for_step(self, step: int, *, ranks: int = 2) -> tuple[RankObservation, ...]:
        """Wait until each rank has done so many steps, and return what the ranks do."""
        until = time.monotonic() + PATIENCE_S
        while True:
            found = tuple(one for rank in range(ranks) if (one := self.observation(rank)) is not None)
            if len(found) == ranks and all(one.step >= step for one in found):
                return found
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < until, found
            time.sleep(0.05)

    def below(self) -> list[psutil.Process]:
        """Return all processes of the run but zerofit's own."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self, *, within_s: float = PATIENCE_S) -> tuple[int, str]:
        """Return the exit code and what was said on stderr."""
        _, said = self.process.communicate(timeout=within_s)
        return self.process.returncode, said

    def record(self) -> dict[str, Any]:
        """Return run.json."""
        return json.loads((self.run_folder / "run.json").read_text())


def assert_all_gone(processes: list[psutil.Process]) -> None:
    """Check that no process of a run is left."""
    assert wait_for_end(processes, within_s=15) == []
