"""Runs a command to its end and keeps what it left: the ground of every test in this folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from forked_programs import ForkedProgram
from typed_flags import check_flags_were_typed

from zerofit.core.rank_observation import read_observation
from zerofit.launching.stacks import dump_stacks
from zerofit.machine.port import free_port

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "launching" / "scripts"
RUN_TIMEOUT_S = 285
"""The first use of DeepSpeed's CPU Adam compiles it, which takes minutes on two cores."""


def stock_launcher() -> tuple[str, ...]:
    """Return how the stock `accelerate launch` is started, at a port that no other test's run takes."""
    return (sys.executable, "-m", "accelerate.commands.launch", f"--main_process_port={free_port(0)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One finished launch."""

    exit_code: int
    stdout: str
    stderr: str
    folder: Path
    """The folder it was started in."""

    @property
    def run_folder(self) -> Path:
        """The one run folder that it left."""
        (folder,) = (self.folder / "zerofit-runs").glob("2*")
        return folder

    def record(self) -> dict[str, object]:
        """Return run.json."""
        return json.loads((self.run_folder / "run.json").read_text())

    def check(self) -> Run:
        """Return this run, if it ended well."""
        assert self.exit_code == 0, f"{self.stdout}\n{self.stderr}\n{self._ends_of_logs()}"
        return self

    def _ends_of_logs(self) -> str:
        """Return the last lines of every rank's log, which are gone with the folder of the test."""
        logs = sorted((self.folder / "zerofit-runs").glob("**/rank*.log"))
        return "\n".join(f"{log}:\n{log.read_text(errors='replace')[-2000:]}" for log in logs)


Launch = Callable[..., Run]
"""Runs `zerofit launch --cpu` with these arguments."""
RunZerofit = Callable[..., subprocess.CompletedProcess[str]]
"""Runs `python -m zerofit` with these arguments: the fixture of that name."""


def environment(**more: str) -> dict[str, str]:
    """Return the environment of every run here: offline, and the venv's own programs first.

    Output is buffered, as it is for users: unbuffered, it has nothing left to write at its end.
    """
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return {**kept, "HF_HUB_OFFLINE": "1", "PATH": path, **more}


def run_command(command: Sequence[str], folder: Path, *, stdin: str = "", **more: str) -> Run:
    """Run a script or module in a folder to its end, as a fork of the fork server.

    Messages of zerofit must name no flag that is not in the command.
    """
    program = ForkedProgram(command, cwd=folder, env=environment(**more), stdin=stdin)
    return _finished(program, command, folder)


def run_process(command: Sequence[str], folder: Path, **more: str) -> Run:
    """Do the same with real processes, where how they start, end or look is what is tested."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=folder, env=environment(**more), stdout=pipe, stderr=pipe, text=True
    ) as process:
        return _finished(process, command, folder)


def _finished(program: subprocess.Popen[str] | ForkedProgram, command: Sequence[str], folder: Path) -> Run:
    try:
        stdout, stderr = program.communicate(timeout=RUN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        stacks = _stacks(program.pid, folder)
        program.terminate()  # zerofit ends its ranks
        stdout, stderr = program.communicate()
        pytest.fail(f"no end after {RUN_TIMEOUT_S} s\n{stdout}\n{stderr}\n{stacks}")
    assert program.returncode is not None
    if tuple(command[1:3]) == ("-m", "zerofit"):
        check_flags_were_typed(command, stderr)
    return Run(exit_code=program.returncode, stdout=stdout, stderr=stderr, folder=folder)


def _stacks(pid: int, folder: Path) -> str:
    """Return each process under a command that hangs, and the stacks of its ranks and their workers."""
    processes = {one.pid: one for one in psutil.Process(pid).children(recursive=True)}
    shown = [f"{one.pid} of {one.ppid()}, {one.status()}: {one.name()}" for one in processes.values()]
    for ranks_folder in folder.glob("zerofit-runs/*/**/ranks"):
        live = (int(path.stem.removeprefix("rank")) for path in ranks_folder.glob("rank*.live"))
        found = {rank: read_observation(ranks_folder, rank) for rank in live}
        ranks = {rank: one for rank, one in found.items() if one is not None and one.pid in processes}
        dump_stacks(ranks, ranks_folder)
        shown += [f"{path}\n{path.read_text()}" for path in ranks_folder.glob("rank*.stack")]
    return "\n".join(shown)


def run_on_ranks(script: Path, folder: Path, *arguments: str, num_ranks: int = 2) -> Run:
    """Run a script in a folder on CPU ranks to its end, which must be a good one."""
    ranks = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}")
    support = os.pathsep.join((str(ROOT / "tests" / "support"), str(ROOT), os.environ.get("PYTHONPATH", "")))
    on_cpu = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return run_command((*ranks, str(script), *arguments), folder, **on_cpu, PYTHONPATH=support).check()
