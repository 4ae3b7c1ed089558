"""What counts as a hang of real processes, which rank is named, and whose stacks are written."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from small_runs import observation

from zerofit.core.observer import Observer
from zerofit.core.rank_observation import Phase, read_observation
from zerofit.launching.hang import RunWatch
from zerofit.launching.work import LOG_COPIER, WorkMeter
from zerofit.training.reporting import copy_output

_LIKE_A_RANK = """
import importlib.util, os, signal, subprocess, sys, time
from pathlib import Path
from zerofit.core.rank_observation import Phase
from zerofit.training.reporting import observe
from zerofit.training.reporting.record import write_record

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
observe.start(folder, rank, on_cpu=True)
own = observe._observed
spec = importlib.util.spec_from_file_location("c10d", folder / "torch/distributed/distributed_c10d.py")
c10d = importlib.util.module_from_spec(spec)
spec.loader.exec_module(c10d)
own.step = 3
"""
"""The start of a process that is watched like a rank; torch, which it does not need, is slow to import."""
_COLLECTIVES = """
import time

def barrier(spins=False):
    until = time.time() + 600
    while time.time() < until:
        None if spins else time.sleep(600)

all_reduce = broadcast = barrier
"""
_WAITS = "own.move(Phase.BACKWARD); c10d.all_reduce()"
_SPINS = "own.move(Phase.SAVING); c10d.barrier(spins=True)"
_WORKS = "while True: pass"
_SLEEPS = "time.sleep(600)"
_LIMIT_S = 2
_PATIENCE_S = 90


class _Ranks:
    """Processes that are watched like ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "torch/distributed").mkdir(parents=True)
        (folder / "torch/distributed/distributed_c10d.py").write_text(_COLLECTIVES)
        self._begun: list[subprocess.Popen[bytes]] = []

    def start(self, *programs: str) -> None:
        for rank, program in enumerate(programs):
            script = self.folder / f"train{rank}.py"
            script.write_text(_LIKE_A_RANK + program)
            self._begun.append(subprocess.Popen([sys.executable, str(script), str(self.folder), str(rank)]))

    def wait(self) -> None:
        """Wait until all can be watched."""
        until = time.monotonic() + _PATIENCE_S
        while any(read_observation(self.folder, rank) is None for rank in range(len(self._begun))):
            assert time.monotonic() < until
            time.sleep(0.05)

    def kill(self) -> None:
        for process in self._begun:
            with_below = [*psutil.Process(process.pid).children(), process]
            for found in with_below:
                found.kill()
            process.wait()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[_Ranks]:
    begun = _Ranks(tmp_path)
    yield begun
    begun.kill()


def _watch_all(
    cases: Mapping[str, tuple[str, str]], folder: Path, *, within_s: float
) -> dict[str, tuple[RunWatch, str | None]]:
    """Return each case's watch and how its run hangs, if it does; all at one time, as most is waiting."""
    runs = {}
    try:
        for number, (name, programs) in enumerate(cases.items()):
            runs[name] = _Ranks(folder / str(number))
            runs[name].start(*programs)
        for run in runs.values():
            run.wait()
        watches = {name: _watch(run.folder) for name, run in runs.items()}
        with ThreadPoolExecutor(len(watches)) as pool:
            found = pool.map(lambda watch: _hang(watch, within_s=within_s), watches.values())
            return {name: (watches[name], sentence) for name, sentence in zip(watches, found, strict=True)}
    finally:
        for run in runs.values():
            run.kill()


class _Told(Observer):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, sentence: str) -> None:
        self.said.append(sentence)


def _watch(folder: Path, *, num_ranks: int = 2, limit_s: float | None = _LIMIT_S, **more: bool) -> RunWatch:
    ranks = range(num_ranks)
    return RunWatch(ranks_folder=folder, ranks=ranks, limit_s=limit_s, observer=_Told(), **more)


def _hang(watch: RunWatch, *, within_s: float = _PATIENCE_S) -> str | None:
    """Return how a run hangs; None if it does not in this time."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if watch.look():
            assert watch.hang is not None
            return watch.hang.sentence
        time.sleep(0.3)
    return None


_HANGS = {
    "asleep in its imports": ((_SLEEPS, "own.move(Phase.PREPARING); c10d.broadcast()"), 0, "loading"),
    "a lock in prepare()": (
        (
            "own.move(Phase.PREPARING); import threading; threading.Event().wait()",
            "own.move(Phase.PREPARING); c10d.broadcast()",
        ),
        0,
        "in wait() at",
    ),
    "alone in save_state()": (
        (_WAITS, "own.move(Phase.SAVING); c10d.barrier()"),
        1,
        "waits in barrier, called at",
    ),
    "alone in an evaluation": (("own.move(Phase.EVALUATING); c10d.barrier()", _WAITS), 0, "waits in barrier"),
    "a pipe that nobody writes to": (
        ("os.mkfifo('f'); open('f')".replace("'f'", "folder / 'f'"), _WAITS),
        0,
        "",
    ),
    "in an exit handler": (
        ("own.move(Phase.ENDED)", "own.move(Phase.ENDED); time.sleep(600)"),
        1,
        "but its process",
    ),
    "failed, in an exit handler": (
        (
            _WAITS,
            "write_record(folder, rank=1, exit_code=1, error=KeyError('a'), changes=()); time.sleep(600)",
        ),
        1,
        "rank 1 has failed with KeyError, and its process does not end",
    ),
    "gone without a record": ((_WAITS, "own.move(Phase.FORWARD); os._exit(0)"), 1, "gone without a record"),
    "stopped": ((_WAITS, "os.kill(os.getpid(), signal.SIGSTOP)"), 1, "is stopped by a signal in"),
    "a stopped process below it": (
        (
            _WAITS,
            "os.kill(subprocess.Popen(['sleep', '600']).pid, signal.SIGSTOP); own.move(Phase.DATA); "
            + _SLEEPS,
        ),
        1,
        "a process started by rank 1 (process ",
    ),
    "waiting takes a core, as on a GPU": (
        (_SPINS, "own.move(Phase.FORWARD); c10d.all_reduce(True)"),
        0,
        "barrier",
    ),
    "a loop without an end keeps others waiting": (
        (_WAITS, _WORKS),
        1,
        "though rank 1 used CPU time; rank 1 is in",
    ),
}


@pytest.fixture(scope="module")
def watched_hangs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[RunWatch, str | None]]:
    programs = {name: programs for name, (programs, _, _) in _HANGS.items()}
    return _watch_all(programs, tmp_path_factory.mktemp("hangs"), within_s=_PATIENCE_S)


@pytest.mark.long
@pytest.mark.parametrize("name", _HANGS)
def test_each_hang_is_ended_and_the_rank_named(
    name: str, watched_hangs: dict[str, tuple[RunWatch, str | None]]
) -> None:
    _, rank, words = _HANGS[name]
    watch, sentence = watched_hangs[name]
    assert sentence is not None
    assert watch.hang is not None
    assert watch.hang.rank == rank, sentence
    assert words in sentence


_NO_HANGS = {
    "data prepared by one rank alone": ("c10d.barrier()", _WORKS),
    "a download by one rank alone": (
        "c10d.barrier()",
        "with open(folder / 'data', 'wb') as file:\n"
        "    while True: file.write(bytes(2**16)); file.flush(); time.sleep(0.3)",
    ),
    "a file read slowly": (
        "c10d.barrier()",
        "while True: open('/dev/zero', 'rb').read(2**17); time.sleep(0.5)",
    ),
    "a compiler below a rank": (
        "own.move(Phase.FORWARD); c10d.broadcast()",
        f"own.move(Phase.PREPARING); subprocess.run([sys.executable, '-c', '{_WORKS}'])",
    ),
    "an evaluation that moves": (
        "c10d.barrier()",
        "while True: own.move(Phase.EVALUATING); time.sleep(0.4)",
    ),
    "collectives": (
        _WAITS,
        "count = 0\nwhile True: count += 1; observe.note_collectives(count); time.sleep(0.4)",
    ),
    "all ranks in the script's own code": ("own.move(Phase.BETWEEN_STEPS)\n" + _WORKS,) * 2,
}


@pytest.fixture(scope="module")
def watched_works(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[RunWatch, str | None]]:
    return _watch_all(_NO_HANGS, tmp_path_factory.mktemp("works"), within_s=4 * _LIMIT_S)


@pytest.mark.long
@pytest.mark.parametrize("name", _NO_HANGS)
def test_what_works_or_moves_is_no_hang(
    name: str, watched_works: dict[str, tuple[RunWatch, str | None]]
) -> None:
    watch, sentence = watched_works[name]
    assert sentence is None
    watch.clear_unused()
    assert not list(watch.ranks_folder.glob("*.stack"))


def test_ranks_that_wait_for_another_node_get_the_time_of_one_that_works(
    tmp_path: Path, ranks: _Ranks
) -> None:
    ranks.start("c10d.barrier()", "c10d.barrier()")
    ranks.wait()
    assert _hang(_watch(tmp_path, is_one_of_nodes=True), within_s=3 * _LIMIT_S) is None
    assert _hang(_watch(tmp_path)) is not None


def test_a_stopped_launcher_is_named_resumed_and_ended_if_it_starts_no_rank(tmp_path: Path) -> None:
    watch = _watch(tmp_path)
    launcher = subprocess.Popen(["sleep", "600"])
    try:
        os.kill(launcher.pid, signal.SIGSTOP)
        until = time.monotonic() + _PATIENCE_S
        while not watch.look(launcher.pid) and time.monotonic() < until:
            time.sleep(0.1)
        assert watch.hang is not None
        assert (watch.hang.rank, watch.hang.phase) == (0, None)
        assert watch.hang.sentence.endswith("; rank 0 has not begun")
        assert isinstance(watch.observer, _Told)
        who = f"accelerate launch (process {launcher.pid}) is"
        assert watch.observer.said == [
            f"{who} stopped by a signal; `kill -CONT {launcher.pid}` resumes it",
            f"nothing goes on: {who} resumed",
        ]
    finally:
        launcher.kill()
        launcher.wait()


@pytest.mark.parametrize(
    ("phases", "step", "longest_s", "limit_s"),
    [
        ((Phase.LOADING, Phase.LOADING), 0, 0, 1800),
        ((Phase.FORWARD, Phase.BACKWARD), 0, 0, 1800),  # the first step may compile
        ((Phase.FORWARD, Phase.BACKWARD), 5, 2, 300),
        ((Phase.FORWARD, Phase.BETWEEN_STEPS), 5, 20, 400),
        ((Phase.BETWEEN_STEPS, Phase.BETWEEN_STEPS), 5, 2, 1800),
        ((Phase.SAVING, Phase.BACKWARD), 5, 2, 1800),
        ((Phase.EVALUATING, Phase.FORWARD), 5, 100, 2000),
        ((Phase.ENDED, Phase.ENDED), 5, 2, 1800),
    ],
)
def test_the_default_limit(
    tmp_path: Path, phases: tuple[Phase, ...], step: int, longest_s: float, limit_s: float
) -> None:
    found = {
        rank: observation(phase, step=step, longest_phase_s=longest_s) for rank, phase in enumerate(phases)
    }
    assert _watch(tmp_path, limit_s=None)._limit_s(found) == limit_s
    assert _watch(tmp_path, limit_s=7)._limit_s(found) == 7


_WORK = {
    "while True: pass": True,
    "import time\nwhile True: time.sleep(0.1)": False,
    "import time\nwhile True: print('still waiting', file=open('log', 'a')); time.sleep(0.2)": False,
    "import time\nwhile True: open('/dev/zero', 'rb').read(10**5); time.sleep(0.2)": True,
    "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'while True: pass'])": True,
    "import os\nwhile True: os.system('true')": True,  # children that end at once
    "import threading\nthreading.Event().wait()": False,
}


def test_work_is_cpu_time_or_bytes_of_a_process_and_all_below(tmp_path: Path) -> None:
    processes = {
        program: subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path) for program in _WORK
    }
    pids = {program: process.pid for program, process in processes.items()}
    try:
        meter = WorkMeter()
        time.sleep(3)  # their start is work
        assert not meter.look(pids.values())
        time.sleep(2)
        busy = meter.look(pids.values())
        assert {program: pid in busy for program, pid in pids.items()} == _WORK
    finally:
        for process in processes.values():
            for found in (*psutil.Process(process.pid).children(), process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    found.kill()
            process.wait()


def test_the_launcher_knows_the_process_that_copies_output_by_its_name() -> None:
    assert copy_output.NAME == LOG_COPIER
