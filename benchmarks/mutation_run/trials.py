"""Trials: a mutant in a copy of the tree, and the tests that see it, until one fails."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mutation_run.forked_tests import LIBRARIES, adopt_orphans, end_tree, load, run_in_fork
from mutation_run.mutants import mutated
from mutation_run.results import Trial, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from mutation_run.coverage_map import Choice
    from mutation_run.mutants import Mutant

Job = tuple["Mutant", "Choice"]

_ROUNDS = (3, 12, 1000)
"""Files of tests in the first round, the second, ...: most mutants need not pay for collecting all."""
_SLOWER, _LOADING_S, _LOADING_FILE_S = 3.0, 60.0, 1.0
"""ASSUMPTION: how much longer than in the map tests may take, on a busy machine, and how long loading them,
before they count as endless."""
_LAST_TRIALS_S = 60.0
"""How long trials that have begun may go on when the time is up."""


def copy_tree(tree: Path, copy: Path, revision: str) -> None:
    """Copy a revision of a repository and compile its package."""
    git = ["git", "-c", "advice.detachedHead=false"]
    subprocess.run([*git, "clone", "-q", "--no-checkout", str(tree), str(copy)], check=True)
    subprocess.run([*git, "-C", str(copy), "checkout", "-q", revision], check=True)
    # Files compiled so are compared with their source, so that no mutant's outlives it.
    compiled = ["-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "zerofit"]
    subprocess.run([sys.executable, *compiled], cwd=copy, check=False)


@dataclass(slots=True)
class _Worker:
    """A process that works on its copy of the tree."""

    process: Any
    channel: Any
    """Takes numbers of jobs, and answers with trials."""
    job: int | None = None
    """What it works on."""


def run_trials(
    trees: Sequence[Path],
    jobs: Sequence[Job],
    *,
    until: float | None = None,
    libraries: Sequence[str] = LIBRARIES,
) -> Iterator[tuple[int, Trial]]:
    """Yield each job's number with what became of its mutant, as they end; a process works on each tree.

    Args:
        until: the time.monotonic() after which none begins.
        libraries: imported once, before the forks; not the package whose code changes.
    """
    load(libraries)
    context: Any = multiprocessing.get_context("fork")
    workers = []
    left = iter(range(len(jobs)))
    try:
        for tree in trees:
            channel, its = context.Pipe()
            process = context.Process(target=_work, args=(tree, jobs, its))
            process.start()
            its.close()
            workers.append(_Worker(process=process, channel=channel))
        for worker in workers:
            _give_next(worker, left, until)
        while busy := {worker.channel: worker for worker in workers if worker.job is not None}:
            wait_s = None if until is None else max(0.0, until + _LAST_TRIALS_S - time.monotonic())
            ready: list[Any] = multiprocessing.connection.wait(list(busy), wait_s)
            if not ready:
                return
            for channel in ready:
                worker = busy[channel]
                number, trial = worker.job, channel.recv()
                _give_next(worker, left, until)
                yield number, trial  # type: ignore[misc]
    finally:
        for worker in workers:
            end_tree(worker.process.pid)
            worker.process.join()


def _give_next(worker: _Worker, left: Iterator[int], until: float | None) -> None:
    is_late = until is not None and time.monotonic() >= until
    worker.job = None if is_late else next(left, None)
    if worker.job is not None:
        worker.channel.send(worker.job)


def _work(tree: Path, jobs: Sequence[Job], channel: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # run_trials() ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    adopt_orphans()
    sound: dict[str, bool] = {}
    while True:
        mutant, choice = jobs[channel.recv()]
        start = time.monotonic()
        trial = _try(tree, mutant, choice, sound)
        seconds = round(time.monotonic() - start, 1)
        channel.send(replace(trial, num_seeing=choice.num_seeing, seconds=seconds))


def _try(tree: Path, mutant: Mutant, choice: Choice, sound: dict[str, bool]) -> Trial:
    """Put the mutant in, run its tests until one fails that passes without it, and take it out."""
    path = tree / mutant.file
    source = path.read_text("utf-8")
    changed = mutated(mutant, source)
    files, num_tried, passed = list(choice.files), 0, list[str]()
    for size in _ROUNDS:
        now, files = files[:size], files[size:]
        tests = [test for file in now for test in file.tests if sound.get(test, True)]
        limit_s = _LOADING_S + _LOADING_FILE_S * len(now) + _SLOWER * sum(file.most_s for file in now)
        while tests:
            path.write_text(changed, "utf-8")
            try:
                outcome = run_in_fork(tree, tests, limit_s)
            finally:
                path.write_text(source, "utf-8")
            if outcome is None:
                if run_in_fork(tree, tests, limit_s) is None:
                    break  # they take as long without the mutant, and say nothing
                return Trial(verdict=Verdict.TIMED_OUT, num_tried=num_tried)
            num_tried += outcome.num_run
            killer = outcome.failed
            if killer is None:
                passed += tests
                break
            if killer not in sound:
                control = run_in_fork(tree, [killer], limit_s)
                sound[killer] = control is not None and control.failed is None
            if sound[killer]:
                return Trial(verdict=Verdict.KILLED, killed_by=killer, num_tried=num_tried)
            at = tests.index(killer) if killer in tests else len(tests)
            passed += tests[:at]
            tests = tests[at + 1 :]
    if not choice.num_seeing:
        return Trial(verdict=Verdict.UNSEEN)
    verdict = Verdict.CUT_OFF if choice.num_cut else Verdict.SURVIVED
    return Trial(verdict=verdict, tests=tuple(passed), num_tried=num_tried, num_cut=choice.num_cut)
