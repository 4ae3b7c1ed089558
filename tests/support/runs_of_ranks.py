"""Starts ranks that have hearts, ends them where those stop, and runs cases."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forked_programs import ForkedProgram
from heart import LIMIT_S, LIMIT_VARIABLE, START_S
from references import prepare

if TYPE_CHECKING:
    from collections.abc import Sequence

    from random_cases import Case

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksEnd:
    """How ranks ended."""

    exit_code: int
    has_stopped: bool
    """True if a heart did: some rank made no step for its limit."""
    places: tuple[str, ...]
    """Where each rank was last, in its own words."""
    said: str
    """The last that they wrote, and the stacks of those that did not end by themselves."""


def run_ranks(
    script: Path, *arguments: str, world_size: int, folder: Path, limit_s: float = LIMIT_S
) -> RanksEnd:
    """Run a script on several ranks to its end, or to the end of its hearts.

    Args:
        script: makes a Heart in the folder.
        arguments: of the script, after the folder.
        world_size: ranks.
        folder: gets hearts, stacks and what the ranks say.
        limit_s: between two beats of a heart.
    """
    for left in (*folder.glob("rank*.at"), *folder.glob("rank*.stacks")):
        left.unlink()
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"),
        *(str(script), str(folder), *arguments),
    ]
    log = folder / "ranks.log"
    with log.open("w") as said:
        ranks = ForkedProgram(
            command,
            cwd=Path.cwd(),
            env={**os.environ, **_environment(), LIMIT_VARIABLE: str(limit_s)},
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        is_ended_here = _wait(ranks, folder, limit_s)
    stacks = {path.stem: path.read_text() for path in sorted(folder.glob("rank*.stacks"))}
    return RanksEnd(
        exit_code=ranks.returncode,
        has_stopped=is_ended_here or any("Timeout (" in text for text in stacks.values()),
        places=tuple(path.read_text() for path in sorted(folder.glob("rank*.at"))),
        said="\n".join((_said(log), *(f"{rank}: {text}" for rank, text in stacks.items()))),
    )


def run_cases(cases: Sequence[Case], folder: Path) -> None:
    """Run cases of one world size; each leaves its results in FOLDER/NUMBER."""
    for case in cases:
        (folder / str(case.number)).mkdir(parents=True, exist_ok=True)
        prepare(case, folder / str(case.number))
    numbers = [str(case.number) for case in cases]
    end = run_ranks(HERE / "ranks_of_cases.py", *numbers, world_size=cases[0].world_size, folder=folder)
    assert end.exit_code == 0, f"ranks ended at {end.places}\n{end.said}"


def _said(log: Path) -> str:
    """The end of what ranks wrote, before torchrun's own account of theirs."""
    return log.read_text().partition('Traceback (most recent call last):\n  File "<frozen runpy>')[0][-8000:]


def _wait(ranks: ForkedProgram, folder: Path, limit_s: float) -> bool:
    """Wait for the ranks' end; return whether they had to be ended because nothing of them moved."""
    begun = time.time()
    while ranks.poll() is None:
        places = list(folder.glob("rank*.at"))
        beats = [path.stat().st_mtime for path in places if path.read_text() != "start"]
        # A rank ends itself at its limit; this is for those that cannot.
        if time.time() > (max(beats) + limit_s if beats else begun + START_S) + 30:
            os.killpg(ranks.pid, signal.SIGTERM)
            try:
                ranks.wait(40)  # torchrun gives its ranks 30 s
            except subprocess.TimeoutExpired:
                os.killpg(ranks.pid, signal.SIGKILL)
                ranks.wait()
            return True
        time.sleep(0.2)
    return False


def _environment() -> dict[str, str]:
    """Ranks on the CPU that find the modules beside this one, and a thread each."""
    return {
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "PYTHONPATH": os.pathsep.join((str(HERE), str(HERE.parents[1]))),
    }
